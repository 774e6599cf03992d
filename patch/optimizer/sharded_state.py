"""Optimizer states as pieces of the weights' global shapes, so that any layout loads them.

A rank's states are ranges of flattened local parameters, cut without regard to rows. Each range becomes a
few rectangles of the parameter's global shape; megatron-core saves them as irregular shards and any other
cut reads them back, in place and without a gather. (Its own flattened ranges are gone:
megatron/core/dist_checkpointing/mapping.py:133.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from patch.errors import CheckpointError
from patch.optimizer.hybrid_adam import state_dtypes

_STATE = "optimizer.state"
"""What the keys of states in checkpoints begin with."""

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


class StateRange(NamedTuple):
    """Neighbouring elements of one parameter's state."""

    parameter: torch.nn.Parameter
    first: int
    """Index of the first of them in the flattened parameter."""
    values: torch.Tensor
    """(n,) a view of the state."""
    dp_rank: int
    """Among the data-parallel ranks that hold the same elements; 0 writes, the others only read."""


class ShardStates:
    """The optimizer states of this rank's shards, as files hold them.

    Args:
        dtypes: the types of the states, by their names.
        ranges: gives the parts of a state by its name: views, valid until chunks move or a step is taken.
        parameters: all trainable ones of this rank.
    """

    def __init__(
        self,
        dtypes: Mapping[str, torch.dtype],
        ranges: Callable[[str], Iterable[StateRange]],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._dtypes, self._ranges, self._parameters = dtypes, ranges, parameters

    def flat(self) -> dict[str, torch.Tensor]:
        """Each state, parameter after parameter, on the CPU."""
        return {
            name: torch.cat([torch.empty(0, dtype=dtype), *(values.cpu() for values in self._views(name))])
            for name, dtype in self._dtypes.items()
        }

    def load_flat(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set them to what `flat` returned.

        Raises:
            CheckpointError: the states are those of other shards.
        """
        views = {name: self._views(name) for name in self._dtypes}
        expected = {name: sum(values.numel() for values in found) for name, found in views.items()}
        got = {name: values.numel() for name, values in states.items()}
        if got != expected:
            raise CheckpointError(
                f"optimizer states have {got} elements on this rank, expected {expected}: load them with the "
                "model, bucket size, number of ranks and ZeRO stage that they were saved with"
            )
        for name, found in views.items():
            parts = states[name].split([values.numel() for values in found])
            for values, part in zip(found, parts, strict=True):
                values.copy_(part)

    def _views(self, name: str) -> list[torch.Tensor]:
        return [part.values for part in self._ranges(name)]

    def sharded(self, model_state: ShardedStateDict, *, is_loading: bool) -> ShardedStateDict:
        """All of them as sharded tensors, views; unless `is_loading` filled up by `zeros_of_frozen`."""
        found: ShardedStateDict = {}
        for name in self._dtypes:
            found |= sharded_ranges(model_state, self._ranges(name), f"{_STATE}.{name}.")
        if not is_loading:
            found |= zeros_of_frozen(model_state, set(map(id, self._parameters)), state_dtypes, _STATE)
        return found


def sharded_ranges(
    model_state: ShardedStateDict, ranges: Iterable[StateRange], prefix: str
) -> ShardedStateDict:
    """Describe flat ranges of a state to dist_checkpointing.

    Args:
        model_state: the model's sharded_state_dict, whose entries hold the parameters themselves.
        ranges: of the state.
        prefix: the shards' keys are `prefix` + the weight's key.
    Returns:
        one entry per rectangle; each holds a view of the state.
    """
    shards = _shards_by_parameter(model_state)
    found: ShardedStateDict = {}
    for parameter, first, state, dp_rank in ranges:
        for shard, start in shards[id(parameter)]:
            begin = max(first, start)
            end = min(first + state.numel(), start + math.prod(_local_shape(shard)))
            for offset, shape in rectangles(_local_shape(shard), begin - start, end - start):
                size = math.prod(shape)
                values = state[begin - first : begin - first + size]
                begin += size
                found |= _entry(shard, prefix, values, (offset, shape), dp_rank)
    return found


def sharded_weights(model_state: ShardedStateDict, ranges: Iterable[StateRange]) -> ShardedStateDict:
    """The model's state with the parts of weights that this rank keeps in the place of whole weights.

    Args:
        model_state: by stage, see `sharded_ranges`.
        ranges: of the weights that it keeps no more of.
    """
    ranges = list(ranges)
    kept = {id(part.parameter) for part in ranges}
    parts = sharded_ranges(model_state, ranges, "")
    return {
        stage: {name: entry for name, entry in entries.items() if id(entry.data) not in kept}
        for stage, entries in model_state.items()
    } | {"shards": parts}


def zeros_of_frozen(
    model_state: ShardedStateDict,
    trained: set[int],
    dtypes_of: Callable[[torch.dtype], Mapping[str, torch.dtype]],
    prefix: str,
) -> ShardedStateDict:
    """Fill up what `sharded_ranges` leaves open where only some layers of a stored tensor train.

    Layers that are stored as one tensor (`prepend_axis_num`) may be frozen one by one, a stored tensor has no
    holes. Collective over the whole job: a tensor none of whose layers trains is left out.

    Args:
        trained: ids of this rank's trainable parameters.
        dtypes_of: names and types of the states of a weight of some type.
        prefix: the shards' keys are `prefix` + "." + state + "." + the weight's key.
    Returns:
        zeros for what is frozen on this rank, to be saved by the replica that saves the weight; they take no
        memory.
    """
    shards = [
        (owner in trained, shard)
        for owner, found in _shards_by_parameter(model_state).items()
        for shard, _ in found
    ]
    everywhere: list = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, {shard.key for is_trained, shard in shards if is_trained})
    filled: ShardedStateDict = {}
    for is_trained, shard in shards:
        if is_trained or not any(shard.key in keys for keys in everywhere):
            continue
        shape = _local_shape(shard)
        offset = (0,) * len(shape)
        for name, dtype in dtypes_of(shard.data.dtype).items():
            zeros = torch.zeros(1, dtype=dtype).expand(math.prod(shape))
            filled |= _entry(shard, f"{prefix}.{name}.", zeros, (offset, shape), _replica(shard)[2])
    return filled


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Rectangle]:
    """Cut elements [begin, end) of a row-major array into rectangles, in the order of the elements.

    Each is contiguous in memory; there are at most 2 * len(shape) - 1 of them.
    """
    if begin >= end:
        return
    if len(shape) == 1:
        yield (begin,), (end - begin,)
        return
    row = math.prod(shape[1:])
    first, last = begin // row, (end - 1) // row
    if begin % row or end < (first + 1) * row:
        stop = min(end, (first + 1) * row)
        for offset, part in rectangles(shape[1:], begin - first * row, stop - first * row):
            yield (first, *offset), (1, *part)
        yield from rectangles(shape, stop, end)
        return
    whole = end // row - first
    yield (first, *(0 for _ in shape[1:])), (whole, *shape[1:])
    if end % row:
        for offset, part in rectangles(shape[1:], 0, end - last * row):
            yield (last, *offset), (1, *part)


def _shards_by_parameter(model_state: ShardedStateDict) -> dict[int, list[tuple[ShardedTensor, int]]]:
    """The sharded tensors of each parameter, and where each begins in the flattened parameter."""
    found: dict[int, list[tuple[ShardedTensor, int]]] = {}
    for entry in nested_values(extract_sharded_tensors_and_factories(model_state)[0]):
        parameter = entry.data
        parts = entry.build() if isinstance(entry, ShardedTensorFactory) else entry
        for shard in nested_values(parts) if isinstance(parts, (dict, list)) else [parts]:
            start = shard.data.storage_offset() - parameter.storage_offset()
            found.setdefault(id(parameter), []).append((shard, start))
    return found


def _local_shape(shard: ShardedTensor) -> tuple[int, ...]:
    return tuple(shard.data.shape)


def _replica(shard: ShardedTensor) -> tuple[int, ...]:
    """Which copy of the weight this is, over pipeline, tensor and data-parallel ranks; (0, 0, 0) writes."""
    return shard.replica_id if isinstance(shard.replica_id, tuple) else (0, 0, shard.replica_id)


def _entry(
    shard: ShardedTensor, prefix: str, values: torch.Tensor, rectangle: Rectangle, dp_rank: int
) -> ShardedStateDict:
    """A state of a rectangle of a weight's shard, by its key and place."""
    (offset, shape), axes, key = rectangle, shard.prepend_axis_num, f"{prefix}{shard.key}"
    inner = (base + more for base, more in zip(shard.global_offset[axes:], offset, strict=True))
    whole, global_offset = (1,) * axes + shape, (*shard.global_offset[:axes], *inner)
    found = ShardedTensor(
        key=key,
        data=values.view(whole),
        dtype=values.dtype,
        local_shape=whole,
        global_shape=shard.global_shape,
        global_offset=global_offset,
        axis_fragmentations=None,
        replica_id=(*_replica(shard)[:2], dp_rank),
    )
    return {f"{key}{global_offset}": found}
