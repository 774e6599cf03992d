"""Checkpoint -> Hugging Face folder, piece by piece, in one process and without building the model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from patch.checkpoint.folder import unverified_weights
from patch.config.schema import ModelConfig, RunConfig
from patch.convert.hf_config_files import (
    copy_descriptions,
    model_of,
    write_config,
    write_descriptions,
    write_index,
)
from patch.convert.hf_layout import divide, known_layout, name_files
from patch.convert.hf_reader import SPELLINGS
from patch.convert.mp_rank_weights import MpRankWeights
from patch.convert.safetensors_writer import SafetensorsWriter
from patch.convert.target_folder import publish, staging, writing
from patch.convert.torch_dist_weights import TorchDistWeights
from patch.convert.weight_table import hf_tensors
from patch.device import same_device
from patch.errors import ConversionError, DataError
from patch.logger import get_logger
from patch.preflight.stored_shape import has_hf_config, run_behind
from patch.progress import progress
from patch.storage.names import METADATA_FILE, SAFE_WEIGHTS_NAME, is_complete
from patch.storage.places import AnyPath, StrPath, any_path, local_path
from patch.storage.remote import RemotePath

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = get_logger(__name__)


class _Description(NamedTuple):
    """The model of a checkpoint, and where its configuration and tokenizer come from."""

    model: ModelConfig
    folder: Path | None
    """A folder with config.json and usually the tokenizer; None: there is none."""
    tokenizer: PreTrainedTokenizerBase | None
    """The tokenizer of the run that trained the model; None: copy the tokenizer files of the folder."""


def mcore_to_hf(
    source: StrPath | RemotePath,
    target: StrPath,
    hf_config: StrPath | None = None,
    *,
    overwrite: bool = False,
) -> None:
    """Convert a checkpoint to a Hugging Face folder; on failure the target stays as it was.

    Args:
        source: a converted folder, a run's folder, its checkpoint/, one checkpoint in it, or a checkpoint of
            Megatron-LM; or a run's checkpoints in a store, by URL.
        target: a folder that does not exist or is empty.
        hf_config: a Hugging Face folder that describes the model; its configuration, tokenizer and layout of
            files are used. None: those of `source` are used.
        overwrite: replace a Hugging Face model at `target`.
    Raises:
        CheckpointError: the checkpoint is damaged.
        ConversionError: the source cannot be read or is of another model, or the target cannot be written.
        OSError: a store does not answer.
    """
    source = source if isinstance(source, RemotePath) else any_path(str(source))
    source, target = source.resolve() if isinstance(source, Path) else source, local_path(target).resolve()
    if not source.is_dir():
        raise ConversionError(f"{source}: no such folder, expected a checkpoint (--load)")
    described = _describe(source, None if hf_config is None else local_path(hf_config))
    folder, verify = unverified_weights(source)
    sources = [path for path in (source, described.folder) if isinstance(path, Path)]
    with ThreadPoolExecutor(1, initializer=same_device()) as pool:
        verified = pool.submit(verify)
        try:
            weights = _open(folder, described.model)
            with staging(target, sources, overwrite=overwrite) as partial:
                _write_weights(weights, partial, described)
                with writing(partial):
                    _write_descriptions(partial, described, next(iter(weights.dtypes.values())))
                verified.result()
                publish(target)
        except Exception:
            verified.result()  # a damaged source is the reason of other errors
            raise
    _logger.info("Hugging Face folder written: %s", target)


def _open(folder: AnyPath, model: ModelConfig) -> TorchDistWeights | MpRankWeights:
    weights: TorchDistWeights | MpRankWeights
    if isinstance(folder, RemotePath) or (folder / METADATA_FILE).is_file():
        weights = TorchDistWeights(folder, model)
    else:
        weights = MpRankWeights(folder, model)
    _check_dtypes(weights)
    return weights


def _check_dtypes(weights: TorchDistWeights | MpRankWeights) -> None:
    for name, dtype in weights.dtypes.items():
        if dtype not in SPELLINGS:
            raise ConversionError(
                f"{weights.folder} stores the values of {name} as {dtype}, expected one of "
                f"{', '.join(map(str, SPELLINGS))}"
            )


def _describe(source: AnyPath, hf_config: Path | None) -> _Description:
    """The model: from --hf-config, from config.json beside the weights, or from the run that wrote them."""
    folder, home = hf_config, source
    if isinstance(source, Path):
        home = source.parent if is_complete(source) and not has_hf_config(source) else source
        folder = hf_config or (home if isinstance(home, Path) and has_hf_config(home) else None)
    if folder is not None:
        return _Description(model_of(folder), folder, None)
    run = run_behind(str(home))
    if run is None:
        raise ConversionError(
            f"{source} holds neither config.json nor a run's config.yaml, expected a description of the "
            "model: give a Hugging Face folder with --hf-config"
        )
    load = run.checkpoint.load
    origin = Path(load) if load is not None and has_hf_config(load) else None
    return _Description(run.model, origin, _tokenizer(run))


def _tokenizer(run: RunConfig) -> PreTrainedTokenizerBase:
    """The tokenizer the run was trained with."""
    from patch.data.chat_templates import ensure_chat_template
    from patch.data.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(run.tokenizer_folder)
        if run.data.dataset_type == "raw":
            ensure_chat_template(tokenizer, run.data.chat_template)
    except DataError as error:
        raise ConversionError(
            f"the run's own {error}; or give the Hugging Face folder it began with as --hf-config"
        ) from error
    return tokenizer


def _write_weights(weights: TorchDistWeights | MpRankWeights, partial: Path, described: _Description) -> None:
    """Write the weights, and the index of several files; the layout is that of `described.folder`."""
    tensors, dtypes = hf_tensors(described.model), weights.dtypes
    sizes = {name: torch.Size(shape).numel() * dtypes[name].itemsize for name, shape in tensors}
    layout = known_layout(described.folder, list(sizes)) or name_files(divide(sizes))
    with (
        writing(partial),
        SafetensorsWriter(partial, tensors, layout, dtypes) as files,
        progress(f"{weights.folder.name} to Hugging Face", sum(sizes.values())) as advance,
    ):
        for block in weights.blocks():
            files.write(block)
            advance(block.values.nbytes)
        files.check_complete()
        if set(layout.values()) != {SAFE_WEIGHTS_NAME}:
            write_index(partial, layout, sum(sizes.values()), described.folder)


def _write_descriptions(partial: Path, described: _Description, dtype: torch.dtype) -> None:
    model, folder, tokenizer = described
    if tokenizer is None:
        assert folder is not None
        copy_descriptions(folder, partial)
        write_config(partial, model, folder, dtype)
    else:
        write_descriptions(partial, model, folder, tokenizer, dtype)
