"""Hugging Face folder -> torch_dist checkpoint, window by window, in one process without a model.

DIR/release/                            the checkpoint: any TP, PP, VPP and upstream's plain GPTModel load it
DIR/latest_checkpointed_iteration.txt   "release": Megatron-LM's word for weights without a training state
DIR/config.json, tokenizer, ...         copies; model.safetensors.index.json remembers the source's files
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from patch.checkpoint.streaming import Piece, PieceWriter
from patch.config.schema import ModelConfig
from patch.convert.folder import publish, staging, writing
from patch.convert.hf_config_files import copy_descriptions, model_of
from patch.convert.hf_reader import INDEX, SINGLE, HFFolder
from patch.convert.live_import import open_checked, tell_rounding
from patch.convert.mappings import Mapping
from patch.convert.progress import progress
from patch.convert.weight_table import hf_tensors, stored_key, weights_table
from patch.errors import ConversionError
from patch.logger import get_logger
from patch.storage.names import RELEASE, TRACKER, is_released

_LOG = get_logger(__name__)
WINDOW_BYTES = 16 * 2**20
"""Largest piece, unless one row is larger: what bounds the memory."""
_EXTRA_STATES = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""Layers whose (empty) extra state upstream's strict load asks for."""


class _Parameter(NamedTuple):
    """One parameter of one layer, as it lies in the checkpoint."""

    key: str
    mapping: Mapping
    shape: tuple[int, ...]
    """Of the stored tensor: with a leading axis where layers are stacked."""
    layer: int | None


def hf_to_mcore(
    source: Path, target: Path, dtype: torch.dtype | None = None, *, overwrite: bool = False
) -> None:
    """Convert a folder; the target appears whole or stays as it was.

    Args:
        source: a Hugging Face folder (safetensors or .bin).
        target: a folder that is not there, or is empty.
        dtype: of all weights; None: each keeps its own.
        overwrite: replace what this function has made at `target`.
    Raises:
        ConversionError: the source cannot be read or is no supported model, or the target cannot be written.
    """
    source, target = source.resolve(), target.resolve()
    if is_released(source):
        raise ConversionError(
            f"{source} is a converted checkpoint, expected a Hugging Face folder (--load): mcore2hf turns it "
            "back into one"
        )
    model = model_of(source)
    folder = open_checked(source, model)
    if dtype is not None:
        tell_rounding(folder, model, dtype, "--params-dtype")
    with staging(target, [source], overwrite=overwrite, released=True) as partial:
        _write_weights(folder, partial / RELEASE, model, dtype)
        with writing(partial):
            copy_descriptions(source, partial)
            _remember_files(folder, partial / INDEX, model)
            (partial / TRACKER).write_text(f"{RELEASE}\n")
        publish(target)
    _LOG.info("checkpoint written: %s", target)


def _write_weights(folder: HFFolder, target: Path, model: ModelConfig, dtype: torch.dtype | None) -> None:
    parameters = list(_parameters(model))
    total = sum(
        torch.Size(tensor.shape).numel() * (dtype or folder.dtype(tensor.name)).itemsize
        for tensor in hf_tensors(model)
    )
    buffer = np.empty(WINDOW_BYTES, np.uint8)
    with writing(target):
        target.mkdir()
        writer = PieceWriter(target)
        try:
            with progress(f"{folder.folder.name} to megatron-core", total) as advance:
                for parameter in parameters:
                    own = dtype or _stored_dtype(folder, parameter.mapping)
                    for piece in _pieces(folder, parameter, own, buffer):
                        writer.add(piece, parameter.shape)
                        advance(piece.tensor.nbytes)
            for layer in range(model.num_layers):
                for name in _EXTRA_STATES:
                    key = f"decoder.layers.{name}._extra_state/shard_{layer}_{model.num_layers}"
                    writer.add_object(key, None)
            writer.finish({"iteration": 0, "checkpoint_version": 3.0})
        finally:
            writer.close()


def _parameters(model: ModelConfig) -> Iterator[_Parameter]:
    """Every parameter of every layer."""
    for name, mapping in weights_table(model, model.padded_vocab_size(1)).items():
        key = stored_key(name)
        if "*" not in name:
            yield _Parameter(key, mapping, mapping.shape, None)
            continue
        for layer in range(model.num_layers):
            yield _Parameter(key, mapping.at_layer(layer), (model.num_layers, *mapping.shape), layer)


def _stored_dtype(folder: HFFolder, mapping: Mapping) -> torch.dtype:
    dtypes = {tensor.name: folder.dtype(tensor.name) for tensor in mapping.hf}
    if len(set(dtypes.values())) > 1:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise ConversionError(
            f"{folder.folder}: {listed} make up one parameter, expected one type: give --params-dtype"
        )
    return next(iter(dtypes.values()))


def _pieces(
    folder: HFFolder, parameter: _Parameter, dtype: torch.dtype, buffer: np.ndarray
) -> Iterator[Piece]:
    """The parameter's rows, as many at a time as the buffer holds; each piece is a view of it."""
    rows, *rest = parameter.mapping.shape
    row_bytes = torch.Size(rest).numel() * dtype.itemsize
    step = max(1, buffer.nbytes // row_bytes)
    lead = () if parameter.layer is None else (parameter.layer,)
    for start in range(0, rows, step):
        count = min(step, rows - start)
        # A tensor whose storage is no larger than itself: torch.save writes whole storages.
        window = torch.from_numpy(buffer[: count * row_bytes]).view(dtype).view(count, *rest)
        sources = [folder[tensor.name] for tensor in parameter.mapping.hf]
        parameter.mapping.fill_rows(window, sources, start)
        shape = (1, count, *rest) if lead else (count, *rest)
        yield Piece(parameter.key, (*lead, start, *[0] * len(rest)), window.view(shape))


def _remember_files(folder: HFFolder, path: Path, model: ModelConfig) -> None:
    """Keep which file of the source each tensor lies in, so that the way back makes the same files."""
    placed = {tensor.name: folder.file_of(tensor.name).name for tensor in hf_tensors(model)}
    if SINGLE not in placed.values() and (folder.folder / INDEX).is_file():
        shutil.copyfile(folder.folder / INDEX, path)
        return
    path.write_text(json.dumps({"weight_map": placed}, indent=2) + "\n")
