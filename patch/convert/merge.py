"""Adapters of a PEFT folder or of a run's checkpoint: read, checked, and merged into the base's weights.

A merged weight is W + scale * (B A), computed in fp32 and rounded once. In fp32 it equals PEFT's
`merge_and_unload` to the bit. For bf16 weights PEFT rounds the product too.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from patch.checkpoint.folder import weights_folder
from patch.config.schema import ModelConfig, RunConfig
from patch.convert.hf_config_files import (
    model_of,
    read_step,
    stated_dtype,
    tokenizer_of,
    write_descriptions,
)
from patch.convert.hf_layout import write_like
from patch.convert.hf_reader import HFFolder, open_checked
from patch.convert.mappings import HFBlock
from patch.convert.stored_weights import StoredWeights
from patch.convert.target_folder import publish, staging, writing
from patch.convert.weight_table import weights_table
from patch.errors import ConfigError, ConversionError
from patch.families.adapters import PEFT_PREFIX, AdapterConfig, base_rows, factor_names, hf_tensors
from patch.preflight.model_of_folder import adapter_at, is_hf_folder, run_behind
from patch.preflight.weight_files import check_adapter
from patch.storage.hub import local_model
from patch.storage.names import ADAPTER_CONFIG_NAME, ADAPTER_FOLDER, TOKENIZER_FILES, iteration_of
from patch.storage.places import AnyPath, StrPath, any_path, local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FactorOf = Callable[[str], torch.Tensor | None]


class _Adapters(NamedTuple):
    """Adapters to merge, with their tokenizer and step."""

    config: AdapterConfig
    factors: dict[str, torch.Tensor]
    """A and B by PEFT's names without `base_model.model.`."""
    dtype: torch.dtype
    """The dtype of the run that trained the adapters."""
    tokenizer: PreTrainedTokenizerBase | None
    step: int | None


def adapter_of(folder: StrPath, model: ModelConfig) -> AdapterConfig:
    """Return the adapter configuration of a PEFT folder.

    Raises:
        ConversionError: there is no adapter_config.json, or it is not supported.
    """
    try:
        return adapter_at(local_path(folder), model)
    except ConfigError as error:
        raise ConversionError(str(error)) from error


def open_adapter(folder: Path, model: ModelConfig, adapter: AdapterConfig) -> HFFolder:
    """Open the weights of a PEFT folder, and check their headers against the adapter configuration.

    Raises:
        ConversionError: the folder cannot be read, or does not fit.
    """
    source = HFFolder(folder, adapter=True)
    check_adapter(source, model, adapter)
    return source


def merged(name: str, weight: torch.Tensor, factor_of: FactorOf, scale: float) -> torch.Tensor:
    """Return a weight of a model, merged with its adapter if it has one.

    Args:
        name: the Hugging Face name.
        weight: the whole tensor.
        factor_of: returns A or B by PEFT's name without `base_model.model.`, or None if there is none.
        scale: the factor of B A.
    Raises:
        ConversionError: a merged value is not finite in the weight's dtype.
    """
    a, b = map(factor_of, factor_names(name))
    if a is None or b is None:
        return weight
    product = b.to(weight.device).float() @ a.to(weight.device).float()
    weight = product.mul_(scale).add_(weight).to(weight.dtype)
    if not weight.isfinite().all():
        kind = str(weight.dtype).removeprefix("torch.")
        raise ConversionError(f"{name} with its adapter has values that are not finite in {kind}")
    return weight


def merge_adapter(
    base: StrPath | None, adapter: StrPath, target: StrPath, *, overwrite: bool = False
) -> None:
    """Write a Hugging Face folder with adapters merged into its weights; on failure the target is unchanged.

    For adapters that a run has trained, the result equals --export-hf: the run's shape, dtype, tokenizer and,
    for nf4 weights, the values that the run used. For other PEFT folders, shape and dtypes are the base's. So
    is the tokenizer, unless there is one beside the adapters.

    Args:
        base: the base model, as a Hugging Face folder or a hub name; None: the run's.
        adapter: a PEFT folder; or a run's folder or URL, or a checkpoint in it.
        target: a new or empty folder.
        overwrite: replace a Hugging Face model at `target`.
    Raises:
        CheckpointError: the checkpoint is damaged.
        ConversionError: a folder cannot be read or written, or the folders do not fit each other.
    """
    place, target = any_path(os.fspath(adapter)), local_path(target).resolve()
    is_peft = (place / ADAPTER_CONFIG_NAME).is_file()
    run = run_behind(str(place.parent if is_peft and place.name == ADAPTER_FOLDER else place))
    folder = _base_folder(base or (None if run is None else run.checkpoint.load))
    model = model_of(folder) if run is None else run.model
    found = _of_peft(local_path(adapter), model) if is_peft or run is None else _of_run(place, run)
    source, dtype = open_checked(folder, model, None, ""), None if run is None else found.dtype
    format = None if run is None else run.adapter.quantize_base
    is_packed = _nf4_names(model) if format else set()

    def values_of(name: str) -> torch.Tensor:
        weight = source[name][:].to(dtype or source.dtype_of(name))
        if format is not None and name in is_packed:
            from patch.model.nf4_product import rounded  # imports megatron-core

            weight = rounded(weight, format)
        return merged(name, weight, found.factors.get, found.config.scale)

    dtypes = {tensor: dtype or source.dtype_of(tensor.name) for tensor in hf_tensors(model)}
    blocks = (HFBlock(name, 0, 0, values_of(name)) for name, _ in dtypes)
    read = [each for each in (folder, place) if isinstance(each, Path)]
    with staging(target, read, overwrite=overwrite) as partial:
        write_like(folder, partial, dtypes, blocks, f"{folder.name} with {place.name}")
        with writing(partial):
            stated = stated_dtype(dtypes.values(), folder)
            write_descriptions(partial, model, folder, found.tokenizer, stated, found.step)
        publish(target, "Hugging Face folder", found.step)


def _base_folder(base: StrPath | None) -> Path:
    cure = "expected the base as a Hugging Face folder: llama-patch merge --base HF_FOLDER --adapter RUN"
    if base is None:
        raise ConversionError(f"no run names the base of the adapters, {cure}")
    folder = local_model(str(local_path(base)), "weights", ConversionError)
    if not is_hf_folder(folder):
        raise ConversionError(f"got {folder}, {cure}")
    return folder.resolve()


def _of_peft(folder: Path, model: ModelConfig) -> _Adapters:
    config = adapter_of(folder, model)
    files = open_adapter(folder, model, config)
    factors = {name.removeprefix(PEFT_PREFIX): files[name][:] for name, _ in files.tensors}
    tokenizer = None
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        from patch.data.tokenizer import load_tokenizer  # takes seconds; most PEFT folders have none

        tokenizer = load_tokenizer(folder)
    return _Adapters(config, factors, files.dtype_of(files.tensors[0].name), tokenizer, read_step(folder))


def _of_run(place: AnyPath, run: RunConfig) -> _Adapters:
    if not run.adapter.is_on:
        raise ConversionError(f"{place} has no adapters: llama-patch convert mcore2hf exports such a run")
    tokenizer = tokenizer_of(run, f"put the tokenizer back at {run.tokenizer_folder}")
    checkpoint = weights_folder(place)
    stored = StoredWeights(checkpoint, run.model, "", run.adapter)
    (dtype,) = {*stored.dtypes.values()}
    return _Adapters(run.adapter, stored.tensors(), dtype, tokenizer, iteration_of(checkpoint))


def _nf4_names(model: ModelConfig) -> set[str]:
    """Return the Hugging Face tensors that --quantize-base keeps in nf4."""
    rows = [weights_table(model)[row.name] for row in base_rows(model)]
    return {tensor.name for row in rows for copy in row.copies for tensor in row.at(*copy).hf}
