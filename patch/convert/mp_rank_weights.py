"""The weights of a checkpoint in Megatron-LM's old format, as blocks of Hugging Face tensors.

FOLDER/mp_rank_TT/model_optim_rng.pt        TP rank TT, without pipeline stages
FOLDER/mp_rank_TT_PPP/model_optim_rng.pt    TP rank TT of pipeline stage PPP

Each file is one pickle. The rank's weights are under `model` (`model0`, `model1`... with interleaved stages);
layer numbers start at 0 in each stage. The number of layers of a stage is counted, so uneven stages are read
too. Checkpoints of Pai-Megatron-Patch, whose final norm is outside of the decoder, are read as well.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from patch.compat.unpickle import load_tensors
from patch.config.schema import ModelConfig
from patch.convert.mappings import HFBlock, TPShard, VocabParallelMapping
from patch.convert.weight_table import table_name, weights_table
from patch.errors import ConversionError, nearest
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT

_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_CHUNK = re.compile(r"model\d*")
_LAYER = re.compile(r"layers\.(\d+)\.")
_NOT_WEIGHTS = ("_extra_state", "inv_freq")
_BYTES_AT_ONCE = 256 * 2**20
"""After this many bytes a file is mapped again, so that pages that were read leave the memory."""


class _RankTensor(NamedTuple):
    """A stored tensor: its file and key, and the parameter that it is a part of."""

    path: Path
    chunk: str
    key: str
    name: str
    layer: int
    tp_rank: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class MpRankWeights:
    """The weights of all ranks; the constructor reads only headers.

    Args:
        folder: the folder that contains the `mp_rank_*` folders.
        model: the shape of the model.
    Raises:
        ConversionError: a file is missing or damaged, or the files are of another model.
    """

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        self.folder, self._model = folder, model
        paths = _rank_files(folder)
        self._tp_size = 1 + max(tp for tp, _ in paths)
        self._parts = list(self._find(paths))
        rows = sum(part.shape[0] for part in self._parts if part.name == EMBEDDING_PARAMETER)
        self._table = weights_table(model, rows)
        self._check()

    def _find(self, paths: Mapping[tuple[int, int], Path]) -> Iterator[_RankTensor]:
        """All tensors, with layers counted over the whole model; interleaved stages alternate."""
        first_layer = [0] * self._tp_size
        ranks = {rank: _chunks(path) for rank, path in paths.items()}
        names = sorted(next(iter(ranks.values())), key=lambda name: (len(name), name))
        for chunk in names:
            for (tp_rank, pp_rank), path in sorted(paths.items(), key=lambda item: item[0][1]):
                tensors = ranks[tp_rank, pp_rank].get(chunk)
                if tensors is None:
                    raise ConversionError(f"{path} has no {chunk}, which the files of other ranks have")
                offset = first_layer[tp_rank]
                for key, (shape, dtype) in tensors.items():
                    match = _LAYER.search(key)
                    layer = offset + int(match[1]) if match else 0
                    first_layer[tp_rank] = max(first_layer[tp_rank], layer + 1 if match else 0)
                    name = table_name(_LAYER.sub("layers.*.", key))
                    if self._model.untie_embeddings_and_output_weights or name != TIED_OUTPUT:
                        yield _RankTensor(path, chunk, key, name, layer, tp_rank, shape, dtype)

    def _check(self) -> None:
        seen = set()
        for part in self._parts:
            if part.name not in self._table or part.layer >= self._model.num_layers:
                hint = nearest(part.name, list(self._table))
                raise ConversionError(
                    f"{part.path} holds {part.key} (layer {part.layer}), which this model has no "
                    f"place for{hint}; expected what config.json describes (--hf-config)"
                )
            mapping = self._table[part.name]
            expected = mapping.shard_shape(self._tp_size)
            is_short = (
                isinstance(mapping, VocabParallelMapping)
                and mapping.padded_vocab_size < self._model.vocab_size
            )
            if part.shape != expected or is_short:
                raise ConversionError(
                    f"{part.key} in {part.path} has shape {part.shape}, expected {expected} by config.json "
                    f"at TP {self._tp_size}: give the folder of this model with --hf-config"
                )
            seen.add((part.name, part.layer, part.tp_rank))
        for name in self._table:
            for layer in range(self._model.num_layers if "*" in name else 1):
                for tp_rank in range(self._tp_size):
                    if (name, layer, tp_rank) not in seen:
                        raise ConversionError(
                            f"{self.folder} lacks {name} of layer {layer} at TP rank {tp_rank}; expected "
                            "what config.json describes (--hf-config)"
                        )

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The type of each Hugging Face tensor."""
        return {
            tensor.name: part.dtype
            for part in self._parts
            for tensor in self._table[part.name].at_layer(part.layer).hf
        }

    def blocks(self) -> Iterator[HFBlock]:
        """All values, one parameter of one rank at a time."""
        opened: dict[str, dict[str, torch.Tensor]] = {}
        read, path = 0, None
        for part in self._parts:
            mapping = self._table[part.name].at_layer(part.layer)
            if mapping.replicated and part.tp_rank > 0:
                continue
            if part.path != path or read > _BYTES_AT_ONCE:
                opened, read, path = _open(part.path), 0, part.path
            values = opened[part.chunk][part.key]
            read += values.nbytes
            shard = TPShard(0, 1) if mapping.replicated else TPShard(part.tp_rank, self._tp_size)
            yield from mapping.megatron_to_hf_blocks(values, shard)


def _rank_files(folder: Path) -> dict[tuple[int, int], Path]:
    """The file of each (TP rank, pipeline stage)."""
    files: dict[tuple[int, int], Path] = {}
    for path in folder.glob("mp_rank_*"):
        if match := _FOLDER.fullmatch(path.name):
            files[int(match[1]), int(match[2] or 0)] = path / "model_optim_rng.pt"
    tp_size = 1 + max((tp for tp, _ in files), default=-1)
    pp_size = 1 + max((pp for _, pp in files), default=-1)
    for tp, pp in product(range(tp_size), range(pp_size)):
        file = files.get((tp, pp))
        if file is None or not file.is_file():
            raise ConversionError(
                f"{folder} lacks model_optim_rng.pt of TP rank {tp}, stage {pp}; expected {tp_size} x "
                f"{pp_size} folders mp_rank_*"
            )
    return files


def _open(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a file by chunk and key, memory-mapped."""
    try:
        contents: Any = load_tensors(path)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ConversionError(
            f"{path} ({path.stat().st_size} bytes) cannot be read: {error or type(error).__name__}"
        ) from error
    chunks = {
        name: {
            key: value
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and not key.endswith(_NOT_WEIGHTS)
        }
        for name, state in (contents.items() if isinstance(contents, dict) else ())
        if isinstance(name, str) and _CHUNK.fullmatch(name) and isinstance(state, dict)
    }
    if not any(chunks.values()):
        raise ConversionError(f"{path} holds no weights of a GPTModel under `model`")
    return chunks


def _chunks(path: Path) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Shape and type of each tensor of a file, by chunk and key."""
    return {
        chunk: {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        for chunk, tensors in _open(path).items()
    }
