"""The weights of a torch_dist checkpoint, ours or Megatron-LM's, as blocks of Hugging Face tensors.

All spellings of megatron-core's keys are read: layers stacked on a leading axis (the default) or one key per
layer (`non_homogeneous_layers`), gate and up as one tensor or two (`singleton_local_shards`), a prefix before
all keys, the final norm outside of the decoder. Optimizer and random states are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from patch.checkpoint.stored import StoredTensor, TorchDistReader
from patch.config.schema import ModelConfig
from patch.convert.mappings import HFBlock, TPShard, VocabParallelMapping, WeightMapping
from patch.convert.weight_table import GATE_AND_UP, table_name, weights_table
from patch.errors import ConversionError, nearest
from patch.families.weights import EMBEDDING_PARAMETER
from patch.storage.places import AnyPath

_MODEL = ("decoder.", "embedding.", "output_layer.", "final_layernorm.")
_LAYER = re.compile(r"layers\.(\d+)\.")
_HALVES = {f"{GATE_AND_UP}_w": 0, f"{GATE_AND_UP}_v": 1}


class _Place(NamedTuple):
    """The parameter, or the part of one, that a stored tensor contains."""

    name: str
    """Name in the weight table."""
    layer: int | None
    """None: the tensor contains all layers, or is outside of layers."""
    first_row: int
    """Row of the parameter at which the tensor begins; above 0 only if it is `up` alone."""
    dtype: torch.dtype


class TorchDistWeights:
    """The model's part of a checkpoint; the constructor reads only the index.

    Args:
        folder: the checkpoint itself (`iter_*`, `release`).
        model: the shape of the model.
    Raises:
        CheckpointError: the checkpoint is damaged.
        ConversionError: the checkpoint is of another model.
    """

    def __init__(self, folder: AnyPath, model: ModelConfig) -> None:
        self.folder, self._model = folder, model
        self._reader = TorchDistReader(folder)
        self._table = weights_table(model)
        self._stored: dict[str, _Place] = {}
        prefix = self._prefix(list(self._reader.tensors))
        for key, tensor in self._reader.tensors.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and name.startswith(_MODEL):
                self._stored[key] = self._locate(key, name, tensor)
        self._check_complete()

    def _prefix(self, keys: list[str]) -> str:
        embeddings = [key for key in keys if key.endswith(EMBEDDING_PARAMETER) and "optimizer" not in key]
        if not embeddings:
            raise ConversionError(
                f"{self.folder} holds no {EMBEDDING_PARAMETER}, expected a GPTModel's weights"
            )
        return min(embeddings, key=len).removesuffix(EMBEDDING_PARAMETER)

    def _locate(self, key: str, name: str, stored: StoredTensor) -> _Place:
        match = _LAYER.search(name)
        layer = int(match[1]) if match else None
        name = _LAYER.sub("layers.", name).replace("layers.", "layers.*.")
        half = _HALVES.get(name)
        name = table_name(name if half is None else GATE_AND_UP)
        if name not in self._table:
            raise ConversionError(
                f"{self.folder} holds {key} (shape {stored.shape}), which this model has no place for"
                f"{nearest(name, list(self._table))}; expected what config.json describes (--hf-config)"
            )
        mapping = self._table[name]
        shape = mapping.shape if half is None else mapping.hf[half].shape
        if "*" in name and layer is None:
            shape = (self._model.num_layers, *shape)
        self._check_shape(key, stored.shape, shape, name)
        first_row = 0 if not half else mapping.hf[0].shape[0]
        return _Place(name, layer, first_row, stored.dtype)

    def _check_shape(self, key: str, got: tuple[int, ...], expected: tuple[int, ...], name: str) -> None:
        """Compare two shapes; only the padding of the vocabulary may differ."""
        is_padded = isinstance(self._table[name], VocabParallelMapping) and got[0] >= expected[0]
        if got != expected and not (is_padded and got[1:] == expected[1:]):
            raise ConversionError(
                f"{self.folder}: {key} has shape {got}, expected {expected} by config.json: give the folder "
                "of this model with --hf-config"
            )

    def _check_complete(self) -> None:
        """Check that every parameter of every layer is stored; missing values show when they are written."""
        names = {(stored.name, stored.layer) for stored in self._stored.values()}
        for name in self._table:
            layers = range(self._model.num_layers) if "*" in name else ()
            missing = [layer for layer in layers if (name, layer) not in names]
            if (name, None) not in names and (missing or not layers):
                where = f" of layer {missing[0]}" if missing else ""
                raise ConversionError(
                    f"{self.folder} lacks {name}{where}; expected what config.json describes (--hf-config)"
                )

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of each Hugging Face tensor."""
        dtypes: dict[str, torch.dtype] = {}
        for stored in self._stored.values():
            layers = range(self._model.num_layers) if stored.layer is None else (stored.layer,)
            for layer in layers:
                dtypes |= {tensor.name: stored.dtype for tensor in self._mapping(stored, layer).hf}
        return dtypes

    def blocks(self) -> Iterator[HFBlock]:
        """All values, one stored piece at a time.

        Raises:
            CheckpointError: a tensor cannot be read; the message names its file.
        """
        for piece in self._reader.pieces(set(self._stored)):
            stored, values, offsets = self._stored[piece.key], piece.tensor, piece.offsets
            if "*" in stored.name and stored.layer is None:
                for index, layer_values in enumerate(values):
                    yield from self._blocks(stored, offsets[0] + index, layer_values, offsets[1:])
            else:
                yield from self._blocks(stored, stored.layer or 0, values, offsets)

    def _blocks(
        self, stored: _Place, layer: int, values: torch.Tensor, offsets: tuple[int, ...]
    ) -> Iterator[HFBlock]:
        column = offsets[1] if len(offsets) > 1 else 0
        row = stored.first_row + offsets[0]
        return self._mapping(stored, layer).megatron_to_hf_blocks(values, TPShard(0, 1), row, column)

    def _mapping(self, stored: _Place, layer: int) -> WeightMapping:
        return self._table[stored.name].at_layer(layer)
