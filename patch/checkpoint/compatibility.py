"""Whether a checkpoint is whole, and whether it fits the state that asks for it. Reads no tensor."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from patch.errors import CheckpointError, nearest

_SAME_LAYOUT = "resume with the TP, PP and number of processes that the checkpoint was saved with"
_SAME_MODEL = "take MODEL_SIZE (position 2) and the tokenizer that the checkpoint was trained with"
SAME_PRECISION = "take the checkpoint's precision (PR, position 9)"
_SECTION_CURES = {"model": _SAME_MODEL, "optimizer": _SAME_MODEL, "random": _SAME_LAYOUT}
NO_CURES: Mapping[str, str] = MappingProxyType({})
_NAMED = 5


def check_files(folder: Path, index: Metadata) -> None:
    """The description can be read; every data file is there and as long as the index says.

    Raises:
        CheckpointError: names the file.
    """
    _check_description(folder / "metadata.json")
    lengths: dict[str, int] = defaultdict(int)
    for place in index.storage_data.values():
        if Path(place.relative_path).name != place.relative_path:
            raise CheckpointError(f"{folder} names a data file outside of itself: {place.relative_path}")
        lengths[place.relative_path] = max(lengths[place.relative_path], place.offset + place.length)
    for name, expected in lengths.items():
        path = folder / name
        got = path.stat().st_size if path.is_file() else None
        if got is None:
            raise CheckpointError(f"{path} is missing; take another checkpoint")
        if got < expected:
            raise CheckpointError(
                f"{path} is truncated: {got} bytes, expected {expected}; take another checkpoint"
            )


def _check_description(path: Path) -> None:
    """Upstream reads it in the middle of a load, and any format but this one by other code."""
    try:
        backend = json.loads(path.read_bytes())["sharded_backend"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; take another checkpoint") from error
    if backend != "torch_dist":
        raise CheckpointError(f"{path} says sharded_backend {backend!r:.60}, expected 'torch_dist'")


def check_fit(
    folder: Path, index: Metadata, shards: list[ShardedBase], requested: set[str], cures: Mapping[str, str]
) -> None:
    """The checkpoint holds what is asked for, in the same shape and dtype, and no more of those sections.

    Args:
        shards: what this rank asks for.
        requested: keys that any rank asks for.
        cures: by how a key begins: what to do where such a key is missing or left over.

    Raises:
        CheckpointError: names tensors, both shapes or dtypes, and the nearest name of a missing one.
    """
    stored = index.state_dict_metadata
    _check_names(folder, set(stored), requested, cures)
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            _check_tensor(folder, shard, stored[shard.key])


def check_weights(
    folder: Path,
    index: Metadata,
    shards: list[ShardedBase],
    requested: set[str],
    *,
    prefixes: tuple[str, ...],
    vocab_size: int,
    cures: Mapping[str, str],
) -> None:
    """The checkpoint holds this model; types and the vocabulary's padding may be others.

    Args:
        shards: what this rank asks for.
        requested: keys that any rank asks for.
        prefixes: how the keys of a model's tensors begin; the checkpoint may hold others.
        vocab_size: rows of the vocabulary that are no padding.
        cures: as `check_fit`.

    Raises:
        CheckpointError: names tensors, and both shapes or the nearest name of a missing one.
    """
    stored = index.state_dict_metadata
    _check_names(folder, {key for key in stored if key.startswith(prefixes)}, requested, cures)
    for shard in shards:
        if isinstance(shard, ShardedTensor):
            _check_shape(folder, shard, stored[shard.key], vocab_size)


def _check_names(folder: Path, stored: set[str], requested: set[str], cures: Mapping[str, str]) -> None:
    stored, requested = ({key for key in keys if not _is_extra_state(key)} for keys in (stored, requested))
    missing = sorted(requested - stored)
    if missing:
        hint = nearest(missing[0], sorted(stored))
        raise CheckpointError(f"{folder} lacks {_listed(missing)}{hint}; {_cure(missing, cures)}")
    sections = {_section(key) for key in requested}
    unexpected = sorted(key for key in stored - requested if _section(key) in sections)
    if unexpected:
        raise CheckpointError(
            f"{folder} holds {_listed(unexpected)}, which this run has not; {_cure(unexpected, cures)}"
        )


def _check_shape(
    folder: Path, shard: ShardedTensor, stored: object, vocab_size: int | None = None
) -> TensorStorageMetadata:
    if not isinstance(stored, TensorStorageMetadata):
        raise CheckpointError(f"{folder}: {shard.key} is an object, expected a tensor")
    got, expected = tuple(stored.size), tuple(shard.global_shape)
    is_padded = vocab_size is not None and shard.allow_shape_mismatch and got[0] >= vocab_size
    if got != expected and not (is_padded and got[1:] == expected[1:]):
        raise CheckpointError(
            f"{folder}: {shard.key} has shape {got}, this run expects {expected}; "
            + _SECTION_CURES[_section(shard.key)]
        )
    return stored


def _check_tensor(folder: Path, shard: ShardedTensor, stored: object) -> None:
    stored = _check_shape(folder, shard, stored)
    if stored.properties.dtype != shard.dtype:
        raise CheckpointError(
            f"{folder}: {shard.key} is {stored.properties.dtype}, this run expects {shard.dtype}; "
            + SAME_PRECISION
        )


def _cure(keys: list[str], cures: Mapping[str, str]) -> str:
    """What makes run and checkpoint agree on these names."""
    for prefix, cure in cures.items():
        if any(key.startswith(prefix) for key in keys):
            return cure
    return "it was saved by another model: " + _SECTION_CURES[_section(keys[0])]


def _section(key: str) -> str:
    """The section a key belongs to: its first part, or "model", whose keys carry no prefix."""
    first = key.split(".", 1)[0]
    return first if first in _SECTION_CURES else "model"


def _is_extra_state(key: str) -> bool:
    """Whether a layer's opaque object, which each layer implementation has or has not."""
    return "._extra_state/" in key


def _listed(keys: list[str]) -> str:
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(keys[:_NAMED]) + more
