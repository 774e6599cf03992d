"""The weights of a checkpoint, ours or Megatron-LM's in either format, as blocks of Hugging Face tensors.

All spellings of megatron-core's keys are read. In torch_dist: layers stacked on a leading axis (the default)
or one key per layer (`non_homogeneous_layers`); experts on a further axis or one key each; gate and up as one
tensor or two (`singleton_local_shards`); a prefix before all keys. Megatron-LM's old format has one pickle
for each rank:

FOLDER/mp_rank_TT/model_optim_rng.pt        TP rank TT, without pipeline stages
FOLDER/mp_rank_TT_PPP/model_optim_rng.pt    TP rank TT of pipeline stage PPP

There a rank's weights are under `model` (`model0`, `model1`... with interleaved stages), and layer numbers
start at 0 in each stage. A stage's layers are counted, so uneven stages are read too. In both formats the
final norm may be outside of the decoder (Pai-Megatron-Patch's LLaMA). Other states are ignored.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch

from patch.checkpoint.stored import LEGACY_FILE, LegacyReader, StoredTensor, TorchDistReader, open_stored
from patch.config.schema import ModelConfig
from patch.convert.hf_reader import SPELLINGS
from patch.convert.mappings import HFBlock, TPShard, WeightMapping
from patch.convert.weight_table import Table, adapter_table, weights_table
from patch.errors import ConversionError, nearest
from patch.families.adapters import INSIDE, AdapterConfig
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT, table_name
from patch.storage.places import AnyPath

_MODEL = ("decoder.", "embedding.", "output_layer.", "final_layernorm.")
_LAYER = re.compile(r"layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(?:local_)?experts\.(?:(\d+)\.)?")
_HALVES = {"linear_fc1.weight_w": 0, "linear_fc1.weight_v": 1}
_RANK_FOLDER = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_RANK_KEY = re.compile(rf"{_RANK_FOLDER.pattern}\.model(\d*)\.(.+)")
_NOT_WEIGHTS = ("_extra_state", "inv_freq")


class _StoredParameter(NamedTuple):
    """The parameter, or the part of a parameter, that a stored tensor contains."""

    name: str
    """Name in the weight table."""
    layer: int | None
    """None if the tensor contains all layers, on a leading axis; 0 outside of layers."""
    expert: int | None
    """None if the tensor contains all experts of its layer, on the next axis; 0 if it belongs to none."""
    half: int | None = None
    """0 or 1 for gate or up alone."""
    tp_rank: int = 0


class StoredWeights:
    """The model's part of a checkpoint; the constructor reads only metadata, no values.

    Args:
        folder: the checkpoint itself (`iter_*`, `release`), or the folder of `mp_rank_*`.
        prefix: key prefix of the tensors, not "" for an optimizer state; None: search the model's prefix.
        adapter: read only these adapters.
    Raises:
        CheckpointError: the checkpoint is damaged.
        ConversionError: a file is missing, or the checkpoint is of another model.
    """

    def __init__(
        self,
        folder: AnyPath,
        model: ModelConfig,
        prefix: str | None = None,
        adapter: AdapterConfig | None = None,
    ) -> None:
        self.folder, self._model, self._adapter, self._tp_size = folder, model, adapter, 1
        self._is_state = bool(prefix)
        self._reader = open_stored(folder)
        if isinstance(self._reader, LegacyReader):
            self._tp_size = _check_rank_files(self._reader)
            tied = not model.untie_embeddings_and_output_weights
            self._places = {
                key: place
                for key, place in _places_by_rank(self._reader)
                if not (tied and place.name == TIED_OUTPUT)
            }
        else:
            self._places = dict(_places(self._reader, prefix))
        self._stored = self._reader.tensors
        self._table = self._checked_table()
        if not self._is_state:  # frozen weights have no states
            self._check_complete()

    def _checked_table(self) -> Table:
        """Check each tensor, and return the weight table with the checkpoint's padding."""
        of_ends = (
            [key for key, place in self._places.items() if place.name == name]
            for name in (EMBEDDING_PARAMETER, TIED_OUTPUT)  # a frozen embedding has no states
        )
        embedding = next(filter(None, of_ends), [])
        rows = sum(self._stored[key].shape[0] for key in embedding if self._stored[key].shape)
        adapter = self._adapter
        table = adapter_table(self._model, adapter) if adapter else weights_table(self._model, rows)
        for key, place in self._places.items():
            self._check_tensor(key, place, self._stored[key], table)
        if embedding and rows < self._model.vocab_size:
            raise ConversionError(
                f"{self.folder}: {embedding[0]} has {rows} rows at TP {self._tp_size}, expected at least "
                f"{self._model.vocab_size} by config.json: give the folder of this model with --hf-config"
            )
        return table

    def _check_tensor(self, key: str, place: _StoredParameter, stored: StoredTensor, table: Table) -> None:
        mapping = table.get(place.name)
        layers = range(self._model.num_layers) if place.layer is None else [place.layer]
        if (
            mapping is None
            or not {*layers} <= {*mapping.layers}
            or (place.expert or 0) >= mapping.num_experts
        ):
            raise ConversionError(
                f"{self.folder} holds {key} (shape {stored.shape}), which this model has no place for"
                f"{nearest(place.name, list(table))}; expected the model of config.json; give its folder "
                "with --hf-config"
            )
        expected = mapping.shard_shape(self._tp_size) if place.half is None else mapping.hf[place.half].shape
        expected = (mapping.num_experts, *expected) if place.expert is None else expected
        expected = (self._model.num_layers, *expected) if place.layer is None else expected
        if stored.shape != expected:
            at = f" at TP {self._tp_size}" if self._tp_size > 1 else ""
            raise ConversionError(
                f"{self.folder}: {key} has shape {stored.shape}, expected {expected} by config.json{at}: "
                "give the folder of this model with --hf-config"
            )
        if stored.dtype not in SPELLINGS and not self._is_state:
            name = mapping.at(place.layer or 0, place.expert or 0).hf[place.half or 0].name
            raise ConversionError(
                f"{self.folder} stores the values of {name} as {stored.dtype}, expected one of "
                f"{', '.join(map(str, SPELLINGS))}"
            )

    def _check_complete(self) -> None:
        """Check that each rank's part of every parameter is stored; missing values are found when writing."""
        found = {
            (place.name, *copy, place.tp_rank)
            for place in self._places.values()
            for copy in self._copies(place)
        }
        for name, mapping in self._table.items():
            for (layer, expert), tp_rank in product(mapping.copies, range(self._tp_size)):
                if (name, layer, expert, tp_rank) not in found:
                    where = f" of layer {layer}" if "*" in name else ""
                    where += f", expert {expert}" if "#" in name else ""
                    where += f" at TP rank {tp_rank}" if self._tp_size > 1 else ""
                    raise ConversionError(
                        f"{self.folder} lacks {name}{where}; expected the model of config.json; give its "
                        "folder with --hf-config"
                    )

    def _copies(self, place: _StoredParameter) -> Iterator[tuple[int, int]]:
        """Return layers and experts in a stored tensor; 0 outside of them."""
        layers = range(self._model.num_layers) if place.layer is None else (place.layer,)
        experts = range(self._table[place.name].num_experts) if place.expert is None else (place.expert,)
        return product(layers, experts)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all Hugging Face tensors, whole, in float64; of an optimizer state those that it has."""
        known = self.dtypes
        found = {
            tensor.name: torch.full(tensor.shape, torch.nan, dtype=torch.float64)
            for mapping in self._table.values()
            for copy in mapping.copies
            for tensor in mapping.at(*copy).hf
            if tensor.name in known
        }
        for name, row, column, values in self.blocks():
            target = found[name][row : row + values.shape[0]]
            (target[:, column : column + values.shape[1]] if values.ndim > 1 else target).copy_(values)
        return found

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """Dtype of each Hugging Face tensor."""
        return {
            tensor.name: self._stored[key].dtype
            for key, place in self._places.items()
            for copy in self._copies(place)
            for tensor in self._table[place.name].at(*copy).hf
        }

    def blocks(self) -> Iterator[HFBlock]:
        """Yield all values, one stored piece at a time.

        Raises:
            CheckpointError: a tensor cannot be read; the message names its file.
        """
        copies = {
            key for key, place in self._places.items() if place.tp_rank and self._table[place.name].replicated
        }
        for key, offsets, values in self._reader.pieces(self._places.keys() - copies):
            place = self._places[key]
            num_axes = (place.layer is None) + (place.expert is None)
            for index in product(*map(range, values.shape[:num_axes])):
                numbers = [offset + number for offset, number in zip(offsets, index, strict=False)]
                layer = numbers.pop(0) if place.layer is None else place.layer
                expert = numbers.pop(0) if place.expert is None else place.expert
                mapping = self._table[place.name].at(layer, expert)
                yield from self._blocks(place, mapping, values[index], offsets[num_axes:])

    def _blocks(
        self, place: _StoredParameter, mapping: WeightMapping, values: torch.Tensor, offsets: tuple[int, ...]
    ) -> Iterator[HFBlock]:
        shard = TPShard(0, 1) if mapping.replicated else TPShard(place.tp_rank, self._tp_size)
        row = offsets[0] + (mapping.hf[0].shape[0] if place.half else 0)
        return mapping.megatron_to_hf_blocks(values, shard, row, offsets[1] if len(offsets) > 1 else 0)


def _places(reader: TorchDistReader, prefix: str | None) -> Iterator[tuple[str, _StoredParameter]]:
    """Yield key and content of each torch_dist tensor whose key begins with the prefix."""
    prefix = _prefix(reader) if prefix is None else prefix
    for key in reader.tensors:
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name.startswith(_MODEL):
            match = _LAYER.search(name)
            name = _LAYER.sub("layers.", name).replace("layers.", "layers.*.")
            half = next((half for ending, half in _HALVES.items() if name.endswith(ending)), None)
            name, expert = _expert(name if half is None else name[:-2])
            layer = int(match[1]) if match else None if "*" in name else 0
            yield key, _StoredParameter(table_name(name), layer, expert, half)


def _prefix(reader: TorchDistReader) -> str:
    embeddings = [
        key for key in reader.tensors if key.endswith(EMBEDDING_PARAMETER) and "optimizer" not in key
    ]
    if not embeddings:
        of_adapters = any(INSIDE in key for key in reader.tensors)
        cure = "; these are adapters of a run: llama-patch merge takes them" if of_adapters else ""
        raise ConversionError(
            f"{reader.folder} holds no {EMBEDDING_PARAMETER}, expected a GPTModel's weights{cure}"
        )
    return min(embeddings, key=len).removesuffix(EMBEDDING_PARAMETER)


def _expert(name: str) -> tuple[str, int | None]:
    """Return the name with `#` for the expert's number, and that number as in `_StoredParameter`."""
    match = _EXPERT.search(name)
    if match is None:
        return name, 0
    return _EXPERT.sub(".experts.local_experts.#.", name), int(match[1]) if match[1] else None


def _places_by_rank(reader: LegacyReader) -> Iterator[tuple[str, _StoredParameter]]:
    """Yield key and content of each rank's tensors. Layers are numbered over the whole model."""
    by_stage: dict[tuple[int, int, int], list[tuple[str, str]]] = {}
    for key in reader.tensors:
        match = _RANK_KEY.fullmatch(key)
        if match and not key.endswith(_NOT_WEIGHTS):
            tp, pp, chunk, name = match.groups()
            by_stage.setdefault((int(chunk or 0), int(pp or 0), int(tp)), []).append((key, name))
    first_layers: dict[int, int] = defaultdict(int)
    for (_, _, tp_rank), tensors in sorted(by_stage.items(), key=lambda stage: stage[0]):
        first = first_layers[tp_rank]
        for key, name in tensors:
            match = _LAYER.search(name)
            layer = first + int(match[1]) if match else 0
            if match:
                first_layers[tp_rank] = max(first_layers[tp_rank], layer + 1)
            name, expert = _expert(_LAYER.sub("layers.*.", name))
            yield key, _StoredParameter(table_name(name), layer, expert, tp_rank=tp_rank)


def _check_rank_files(reader: LegacyReader) -> int:
    """Return the TP size, after a check that all ranks have a file with weights."""
    folder = reader.folder
    matches = [_RANK_FOLDER.fullmatch(path.name) for path in folder.glob("mp_rank_*")]
    ranks = {(int(match[1]), int(match[2] or 0)): match[0] for match in matches if match}
    tp_size, pp_size = (1 + max((rank[axis] for rank in ranks), default=-1) for axis in (0, 1))
    with_weights = {key.split(".")[0] for key in reader.tensors if _RANK_KEY.fullmatch(key)}
    for tp, pp in product(range(tp_size), range(pp_size)):
        file = folder / ranks.get((tp, pp), "-") / LEGACY_FILE
        if not file.is_file():
            raise ConversionError(
                f"{folder} lacks {LEGACY_FILE} of TP rank {tp}, stage {pp}; expected {tp_size} x {pp_size} "
                "folders mp_rank_*"
            )
        if file.parent.name not in with_weights:
            raise ConversionError(
                f"{file} has no GPTModel weights, expected them under the key `model`; take another "
                "checkpoint"
            )
    return tp_size
