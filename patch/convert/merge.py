"""A folder of PEFT: written, read and checked, and merged into the weights that it is beside.

A merged weight is W + scale * (B A), computed in fp32 and rounded once: in fp32 PEFT's `merge_and_unload` to
the bit; of weights in bf16 PEFT rounds the product too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from patch.config.schema import ModelConfig, RunConfig
from patch.convert.hf_config_files import (
    model_of,
    read_step,
    stated_dtype,
    write_descriptions,
    write_tokenizer,
)
from patch.convert.hf_layout import write_like
from patch.convert.hf_reader import HFFolder, open_checked
from patch.convert.mappings import HFBlock, HFTensor
from patch.convert.target_folder import publish, staging, writing
from patch.convert.weight_table import hf_tensors, weights_table
from patch.errors import ConfigError, ConversionError
from patch.families.adapters import PEFT_PREFIX, AdapterConfig, base_rows, write_adapter
from patch.preflight.stored_shape import adapter_at
from patch.storage.hub import snapshot_name
from patch.storage.names import ADAPTER_CONFIG_NAME, TOKENIZER_FILES
from patch.storage.places import StrPath, local_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FactorOf = Callable[[str], torch.Tensor | None]


def adapter_of(folder: StrPath, model: ModelConfig) -> AdapterConfig:
    """The adapters of a model that a folder of PEFT describes.

    Raises:
        ConversionError: there is no adapter_config.json, or what it describes is not supported.
    """
    try:
        return adapter_at(local_path(folder), model)
    except ConfigError as error:
        raise ConversionError(str(error)) from error


def open_adapter(folder: Path, model: ModelConfig, adapter: AdapterConfig) -> HFFolder:
    """Open the weights of a folder of PEFT, and check by their headers that they are all of these adapters.

    Raises:
        ConversionError: the folder cannot be read, or does not fit.
    """
    source = HFFolder(folder, adapter=True)
    source.check([HFTensor(PEFT_PREFIX + name, shape) for name, shape in hf_tensors(model, adapter)])
    return source


def merged(name: str, weight: torch.Tensor, factor_of: FactorOf, scale: float) -> torch.Tensor:
    """A weight of a model, merged with its adapter if it has one.

    Args:
        name: its Hugging Face name.
        weight: the whole tensor.
        factor_of: A or B by PEFT's name without `base_model.model.`; None where there is none.
        scale: the factor of what an adapter gives.
    Raises:
        ConversionError: a merged value is not finite in the type of the weight.
    """
    module = name.removesuffix(".weight")
    a, b = (factor_of(f"{module}.lora_{each}.weight") for each in "AB")
    if a is None or b is None:
        return weight
    product = b.to(weight.device).float() @ a.to(weight.device).float()
    weight = product.mul_(scale).add_(weight).to(weight.dtype)
    if not weight.isfinite().all():
        kind = str(weight.dtype).removeprefix("torch.")
        raise ConversionError(f"{name} with its adapter has values that are not finite in {kind}")
    return weight


def write_beside_adapter(
    folder: Path,
    model: ModelConfig,
    adapter: AdapterConfig,
    base: str | None,
    tokenizer: PreTrainedTokenizerBase | None,
    step: int | None,
) -> None:
    """Write all of a folder of PEFT but the weights: what they are, the tokenizer, the step.

    Args:
        folder: an existing folder to write to.
        model: the model that has the adapters.
        adapter: what they are.
        base: the folder or the hub's name of the model beside which they were trained.
        tokenizer: the tokenizer of the run; None: the base's is meant.
        step: the finished steps of the run.
    """
    name = snapshot_name(base) if base is not None else None
    described = write_adapter(model, adapter, base if name is None else name.repo)
    described |= {} if name is None else {"revision": name.revision}
    (folder / ADAPTER_CONFIG_NAME).write_text(f"{json.dumps(described, indent=2)}\n")
    write_tokenizer(folder, tokenizer, step)


def merge_adapter(
    base: StrPath, adapter: StrPath, target: StrPath, *, overwrite: bool = False, run: RunConfig | None = None
) -> None:
    """Write a Hugging Face folder with an adapter merged into its weights.

    Tensor by tensor; on failure the target stays as it was. A tokenizer beside the adapter replaces the
    base's.

    Args:
        base: the Hugging Face folder that the adapter is of.
        adapter: a folder of PEFT.
        target: a folder that does not exist or is empty.
        overwrite: replace a Hugging Face model at `target`.
        run: the run that has trained the adapter: the result has the run's shape and type, and of weights in
            4 bits the values that the run has seen. None: shape and types are the base's.
    Raises:
        ConversionError: a folder cannot be read or written, or they do not fit each other.
    """
    base, adapter, target = (local_path(each).resolve() for each in (base, adapter, target))
    model = model_of(base) if run is None else run.model
    config = adapter_of(adapter, model)
    source, factors = open_checked(base, model, None, ""), open_adapter(adapter, model, config)
    known = {tensor.name for tensor in factors.tensors}

    def factor_of(name: str) -> torch.Tensor | None:
        return factors[PEFT_PREFIX + name][:] if PEFT_PREFIX + name in known else None

    dtype, in_4_bits = None, set[str]()
    if run is not None:
        dtype = factors.dtype_of(factors.tensors[0].name)
        rows = [weights_table(model)[row.name] for row in base_rows(model) if run.adapter.quantize_base]
        in_4_bits = {each.name for row in rows for copy in row.copies for each in row.at(*copy).hf}

    def values_of(name: str) -> torch.Tensor:
        weight = source[name][:].to(dtype or source.dtype_of(name))
        if name in in_4_bits:
            from patch.model.four_bit_product import dequantize, quantize  # with all of megatron-core's model

            weight = dequantize(quantize(weight), weight.dtype)
        return merged(name, weight, factor_of, config.scale)

    dtypes = {tensor: dtype or source.dtype_of(tensor.name) for tensor in hf_tensors(model)}
    blocks, step = (HFBlock(name, 0, 0, values_of(name)) for name, _ in dtypes), read_step(adapter)
    tokenizer = None
    if any((adapter / name).is_file() for name in TOKENIZER_FILES):
        from patch.data.tokenizer import load_tokenizer  # takes seconds, and most folders of PEFT have none

        tokenizer = load_tokenizer(adapter)
    with staging(target, [base, adapter], overwrite=overwrite) as partial:
        write_like(base, partial, dtypes, blocks, f"{base.name} with {adapter.name}")
        with writing(partial):
            write_descriptions(partial, model, base, tokenizer, stated_dtype(dtypes.values(), base), step)
        publish(target, "Hugging Face folder", step)
