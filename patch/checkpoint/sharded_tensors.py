"""The shards of a state dict on this rank; checks that a checkpoint is complete and fits. Reads no tensor."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import PurePath
from typing import Any, NamedTuple

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from patch.errors import CheckpointError, nearest
from patch.storage.names import COMMON_KEY
from patch.storage.places import AnyPath, file_sizes
from patch.storage.text_files import read_json

_NAMED = 5
_OVERHEAD = 2048
"""Bytes of a small tensor: about 1.6 kB for its record (torch.save's zip), 0.4 kB in the index."""


class _Fix(NamedTuple):
    """Advice for a checkpoint that does not fit the run."""

    advice: str
    field: str | None = None
    """The configuration field to change."""

    def error(self, what: str) -> CheckpointError:
        """Return the error that says what does not fit, and the advice."""
        return CheckpointError(f"{what}; {self.advice}", field=self.field)


_SAME_LAYOUT = _Fix("resume with the TP, PP and number of processes that the checkpoint was saved with")
_SAME_MODEL = _Fix(
    "take the model shape and the tokenizer that the checkpoint was trained with", "model_size"
)
_SAME_PRECISION = _Fix("take the checkpoint's precision", "precision")
_SAME_MOMENTS = _Fix("take its --exp-avg-dtype and --exp-avg-sq-dtype", "exp_avg_dtype")
_SECTION_FIXES = {"model": _SAME_MODEL, "optimizer": _SAME_MODEL, "random": _SAME_LAYOUT}
_SAME_TYING = _Fix(
    "one of them ties the output layer to the embedding: change untie_embeddings_and_output_weights, or take "
    "the model shape that the checkpoint was trained with",
    "untie_embeddings_and_output_weights",
)
# A tied model has no output layer; the kind of master weights depends on the dtype of the weights.
_FIXES = {
    "output_layer.weight": _SAME_TYING,
    "optimizer.state.master": _SAME_PRECISION,  # or master_low
    "optimizer.state.exp_avg_scale.": _SAME_MOMENTS,
    "optimizer.state.exp_avg_sq_scale.": _SAME_MOMENTS,
}
"""Prefix of a tensor's name -> the cure if only the run or only the checkpoint has the tensor."""


def shards_of(sharded_state: dict[str, Any]) -> list[ShardedBase]:
    """Return this rank's ShardedTensors and ShardedObjects; factories (fc1: gate and up) are expanded."""
    shards: list[ShardedBase] = []
    for value in nested_values(sharded_state):
        if isinstance(value, ShardedTensorFactory):
            shards += shards_of({"built": value.build()})
        elif isinstance(value, ShardedBase):
            shards.append(value)
    return shards


def copied(sharded_state: dict[str, Any]) -> dict[str, Any]:
    """Copy the nesting and the shards, but share the tensors.
    Upstream expands factories of its argument in place, and adds an axis to the data of stacked layers.
    """
    return dict_list_map_outplace(
        lambda value: copy.copy(value) if isinstance(value, ShardedBase) else value, sharded_state
    )


def index_key(shard: ShardedBase) -> str:
    """Return the shard's key in the checkpoint's index."""
    return shard.unique_key if isinstance(shard, ShardedObject) else shard.key


def bytes_to_write(shards: list[ShardedBase]) -> int:
    """Return the bytes of the tensors that this rank writes; small objects are ignored."""
    written = [
        shard for shard in shards if isinstance(shard, ShardedTensor) and is_main_replica(shard.replica_id)
    ]
    assert all(shard.data is not None for shard in written), "a state dict to save holds its tensors"
    return sum(shard.data.nbytes + _OVERHEAD for shard in written)


def check_files(folder: AnyPath, index: Metadata) -> None:
    """Check metadata.json and the existence and lengths of all data files.

    Raises:
        CheckpointError: a file is missing, damaged or truncated; the message names it.
    """
    _check_description(folder / "metadata.json")
    lengths: dict[str, int] = defaultdict(int)
    for place in index.storage_data.values():
        if PurePath(place.relative_path).name != place.relative_path:
            raise CheckpointError(
                f"{folder} names the data file {place.relative_path}, expected a file in the folder; take "
                "another checkpoint"
            )
        lengths[place.relative_path] = max(lengths[place.relative_path], place.offset + place.length)
    sizes = file_sizes(folder)
    for name, expected in lengths.items():
        path, got = folder / name, sizes.get(name)
        if got is None:
            raise CheckpointError(f"{path} is missing; take another checkpoint")
        if got < expected:
            raise CheckpointError(
                f"{path} is truncated: {got} bytes, expected {expected}; take another checkpoint"
            )


def _check_description(path: AnyPath) -> None:
    """Refuse a bad metadata.json before upstream reads it in the middle of a load."""
    try:
        backend = read_json(path)["sharded_backend"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; take another checkpoint") from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"{path} says sharded_backend {backend!r:.60}, expected 'torch_dist'; save it again as "
            "torch_dist, or take another checkpoint"
        )


class WeightsOnly(NamedTuple):
    """Weights of any checkpoint; their dtypes and vocabulary padding may differ."""

    prefixes: tuple[str, ...]
    """Key prefixes of the model's tensors; other keys are ignored."""
    vocab_size: int
    """Rows of the vocabulary without padding."""


def check_fit(
    folder: AnyPath,
    index: Metadata,
    shards: list[ShardedBase],
    requested: set[str],
    weights: WeightsOnly | None = None,
) -> None:
    """Check that the checkpoint has exactly the requested keys, with the same shapes and dtypes.

    Sections without a requested key are not compared.

    Args:
        requested: keys that all ranks together load.
        weights: given if only weights are loaded; their dtypes and padding may differ.
    Raises:
        CheckpointError: the checkpoint does not fit. The message names the tensors, both shapes or dtypes,
            and the stored name nearest to a missing one.
    """
    stored = index.state_dict_metadata
    keys = {key for key in stored if weights is None or key.startswith(weights.prefixes)} - {COMMON_KEY}
    _check_names(folder, keys, requested)
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            _check_tensor(folder, shard, stored[shard.key], weights)


def _check_names(folder: AnyPath, stored: set[str], requested: set[str]) -> None:
    stored, requested = ({key for key in keys if not _is_extra_state(key)} for keys in (stored, requested))
    missing = sorted(requested - stored)
    if missing:
        hint = nearest(missing[0], sorted(stored))
        raise _fix_for(missing).error(f"{folder} lacks {_listed(missing)}{hint}")
    sections = {_section(key) for key in requested}
    unexpected = sorted(key for key in stored - requested if _section(key) in sections)
    if unexpected:
        what = f"{folder} holds {_listed(unexpected)}, which this run does not have"
        raise _fix_for(unexpected).error(what)


def _check_tensor(folder: AnyPath, shard: ShardedTensor, stored: object, weights: WeightsOnly | None) -> None:
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"{folder}: {shard.key} is an object, expected a tensor")
    got, expected = tuple(stored.size), tuple(shard.global_shape)
    is_padded = weights is not None and shard.allow_shape_mismatch and got[0] >= weights.vocab_size
    if got != expected and not (is_padded and got[1:] == expected[1:]):
        what = f"{folder}: {shard.key} has shape {got}, this run expects {expected}"
        raise _SECTION_FIXES[_section(shard.key)].error(what)
    if weights is None and stored.properties.dtype != shard.dtype:
        fix = _SAME_MOMENTS if ".exp_avg" in shard.key else _SAME_PRECISION
        what = f"{folder}: {shard.key} is {stored.properties.dtype}, this run expects {shard.dtype}"
        raise fix.error(what)


def _fix_for(keys: list[str]) -> _Fix:
    for prefix, fix in _FIXES.items():
        if any(key.startswith(prefix) for key in keys):
            return fix
    fix = _SECTION_FIXES[_section(keys[0])]
    return fix._replace(advice=f"it was saved by another model: {fix.advice}")


def _section(key: str) -> str:
    """Return the first part of a key, or "model", whose keys have no prefix."""
    first = key.split(".", 1)[0]
    return first if first in _SECTION_FIXES else "model"


def _is_extra_state(key: str) -> bool:
    """Return whether the key is an opaque object of a layer, which only some implementations have."""
    return "._extra_state/" in key


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(keys[:_NAMED]) + more
