"""Optimizer states as pieces of the weights' global shapes, so that any layout loads them.

A rank's states are ranges of flattened local parameters, which do not end at rows. Each range becomes a few
rectangles of the parameter's global shape. megatron-core saves the rectangles as irregular shards, and any
other layout reads them in place and without a gather. (megatron-core removed its own flattened ranges:
megatron/core/dist_checkpointing/mapping.py:133.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from typing import NamedTuple

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories

from patch.distributed.collectives import all_gather_object
from patch.errors import CheckpointError
from patch.memory.disk import on_host, write_values
from patch.optimizer.kernels.low_bit_moments import RngCoords, elements_of

Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offset and shape."""


class StateRange(NamedTuple):
    """Neighbouring elements of one parameter's state."""

    parameter: torch.nn.Parameter
    first: int
    """Index of the first element in the flattened parameter."""
    values: torch.Tensor
    """(n,) a view of the state."""
    dp_rank: int
    """Rank among the data-parallel ranks with the same elements; only rank 0 writes."""


class ShardStates:
    """States of this rank's shards, or their gradients, as checkpoints hold them.

    Args:
        prefix: how their keys begin.
        dtypes: the dtypes of the states, by their names; "" for a nameless state.
        ranges: returns the parts of a state by its name: views, valid until chunks move or the next step.
        parameters: all trainable parameters of this rank.
    """

    def __init__(
        self,
        prefix: str,
        dtypes: Mapping[str, torch.dtype],
        ranges: Callable[[str], Iterable[StateRange]],
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        self._prefix, self._dtypes, self._ranges, self._parameters = prefix, dtypes, ranges, parameters

    def flat(self) -> dict[str, torch.Tensor]:
        """Return each state as one flat tensor on the CPU."""
        return {
            name: torch.cat([torch.empty(0, dtype=dtype), *map(on_host, self._views(name))])
            for name, dtype in self._dtypes.items()
        }

    def load_flat(self, states: Mapping[str, torch.Tensor]) -> None:
        """Set the states to a result of `flat`.

        Raises:
            CheckpointError: the states belong to different shards.
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
                write_values(values, part)

    def _views(self, name: str) -> list[torch.Tensor]:
        return [part.values for part in self._ranges(name)]

    def sharded(self, model_state: ShardedStateDict, *, is_loading: bool) -> ShardedStateDict:
        """Return the states as sharded tensors that are views; for saving, add `zeros_of_frozen`."""
        found: ShardedStateDict = {}
        for name in self._dtypes:
            key = _key(self._prefix, name)
            found |= sharded_ranges(model_state, self._ranges(name), key, elements_of(name))
        if not is_loading:
            trained, stored = set(map(id, self._parameters)), {entry.key for entry in found.values()}
            found |= zeros_of_frozen(model_state, trained, self._dtypes, stored, self._prefix)
        return found


def _key(prefix: str, state: str) -> str:
    return f"{prefix}.{state}." if state else f"{prefix}."


def sharded_ranges(
    model_state: ShardedStateDict, ranges: Iterable[StateRange], prefix: str, each: int = 1
) -> ShardedStateDict:
    """Describe flat ranges of a state to dist_checkpointing, with an entry (a view) for each rectangle.

    Args:
        model_state: the model's sharded_state_dict, whose entries hold the parameters themselves.
        prefix: the shards' keys are `prefix` + the weight's key.
        each: neighbouring elements of a row that share one element of the state.
    """
    shards = _shards_by_parameter(model_state)
    found: ShardedStateDict = {}
    for parameter, first, state, dp_rank in ranges:
        for shard, start in shards[id(parameter)]:
            part = math.prod(_local_shape(shard))
            begin = max(first, start)
            end = min(first + state.numel() * each, start + part)
            place = (begin - first) // each
            for offset, shape in rectangles(
                _fewer(_local_shape(shard), each), (begin - start) // each, (end - start) // each
            ):
                size = math.prod(shape)
                values = state[place : place + size]
                place += size
                found |= _entry(shard, prefix, values, (offset, shape), dp_rank, each)
    return found


def sharded_weights(
    model_state: ShardedStateDict, ranges: Iterable[StateRange], in_shards: set[int]
) -> ShardedStateDict:
    """Return the model's state with this rank's parts in place of sharded weights.

    Args:
        ranges: this rank's parts of sharded weights; the state may lack some of them.
        in_shards: ids of all sharded weights, even if all their parts are on other ranks.
    """
    known = _shards_by_parameter(model_state)
    ranges = [part for part in ranges if id(part.parameter) in known]
    return _without(model_state, in_shards) | sharded_ranges(model_state, ranges, "")


def _without(state: ShardedStateDict, parameters: set[int]) -> ShardedStateDict:
    return {
        name: _without(entry, parameters) if isinstance(entry, dict) else entry
        for name, entry in state.items()
        if isinstance(entry, dict) or id(entry.data) not in parameters
    }


def rng_coords_of(
    named: Sequence[tuple[str, torch.nn.Parameter]], model_state: ShardedStateDict | None
) -> list[list[tuple[int, RngCoords]]]:
    """Return the parts of whole weights that each parameter contains, each with its first element, in order.

    Without `model_state`, parameters are whole and identified by name.
    """
    if model_state is None:
        return [[(0, RngCoords(name, 0, parameter.numel(), 0))] for name, parameter in named]
    shards = _shards_by_parameter(model_state)
    return [
        sorted((start, _rng_coords(shard)) for shard, start in shards[id(parameter)])
        for _, parameter in named
    ]


def _rng_coords(shard: ShardedTensor) -> RngCoords:
    """Return the place of a weight's shard in the whole weight, which is cut in one dimension."""
    whole, local = shard.global_shape, _local_shape(shard)
    first = 0
    for size, offset in zip(whole, shard.global_offset, strict=True):
        first = first * size + offset
    is_row_cut = local[-1] != whole[-1]
    assert len(local) < 3, "a shard of more than two dimensions"
    return RngCoords(shard.key, first, local[-1] if is_row_cut else math.prod(local), whole[-1])


def zeros_of_frozen(
    model_state: ShardedStateDict,
    trained: set[int],
    dtypes: Mapping[str, torch.dtype],
    stored: set[str],
    prefix: str,
) -> ShardedStateDict:
    """Return zeros for frozen layers, which `sharded_ranges` leaves out of stored tensors.

    Layers that are stored as one tensor (`prepend_axis_num`) may be frozen separately, but a stored tensor
    has no holes. Collective over the whole job: a tensor whose layers are all frozen is left out. The replica
    that saves the weight saves the zeros, which take no memory.

    Args:
        trained: ids of this rank's trainable parameters.
        dtypes: the dtypes of all states, by their names; "" for a nameless state.
        stored: the keys of the states that this rank stores.
        prefix: the shards' keys are `prefix` + "." + state + "." + the weight's key.
    """
    shards = [found for owner, found in _shards_by_parameter(model_state).items() if owner not in trained]
    everywhere = set[str]().union(*all_gather_object(stored))
    filled: ShardedStateDict = {}
    for (shard, _), (name, dtype) in product(chain.from_iterable(shards), dtypes.items()):
        key, each = _key(prefix, name), elements_of(name)
        if key + shard.key in everywhere:
            shape = _fewer(_local_shape(shard), each)
            zeros = torch.zeros(1, dtype=dtype).expand(math.prod(shape))
            filled |= _entry(shard, key, zeros, ((0,) * len(shape), shape), _replica(shard)[2], each)
    return filled


def rectangles(shape: tuple[int, ...], begin: int, end: int) -> Iterator[Rectangle]:
    """Cut elements [begin, end) of a row-major array into at most 2 * len(shape) - 1 contiguous
    rectangles."""
    if begin >= end:
        return
    row = math.prod(shape[1:])
    first, last = -(-begin // row), end // row  # the rows from the first to the last are whole

    def within(number: int, start: int, stop: int) -> Iterator[Rectangle]:
        for offset, part in rectangles(shape[1:], start - number * row, stop - number * row):
            yield (number, *offset), (1, *part)

    yield from within(first - 1, begin, min(first * row, end))
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    if first <= last:
        yield from within(last, last * row, end)


def _shards_by_parameter(model_state: ShardedStateDict) -> dict[int, list[tuple[ShardedTensor, int]]]:
    """Return the sharded tensors of each parameter, without values, and their offsets in the flat parameter.

    Offsets come from a contiguous meta tensor, because a freed parameter is an expanded scalar.
    """
    found: dict[int, list[tuple[ShardedTensor, int]]] = {}
    for entry in nested_values(extract_sharded_tensors_and_factories(model_state)[0]):
        own = found.setdefault(id(entry.data), [])
        if not isinstance(entry, ShardedTensorFactory):
            own.append((entry, 0))
            continue
        parts = replace(entry, data=torch.empty_like(entry.data, device="meta").contiguous()).build()
        shards = nested_values(parts) if isinstance(parts, (dict, list)) else [parts]
        own += [(shard, shard.data.storage_offset()) for shard in shards]
    return found


def _local_shape(shard: ShardedTensor) -> tuple[int, ...]:
    return tuple(shard.data.shape)


def _fewer(shape: tuple[int, ...], each: int) -> tuple[int, ...]:
    """Divide the last dimension of a shape or offset by `each`."""
    return *shape[:-1], shape[-1] // each


def _replica(shard: ShardedTensor) -> tuple[int, ...]:
    """Return the replica index over pipeline, tensor and data-parallel ranks; (0, 0, 0) writes."""
    return shard.replica_id if isinstance(shard.replica_id, tuple) else (0, 0, shard.replica_id)


def _entry(
    shard: ShardedTensor, prefix: str, values: torch.Tensor, rectangle: Rectangle, dp_rank: int, each: int
) -> ShardedStateDict:
    (offset, shape), axes, key = rectangle, shard.prepend_axis_num, f"{prefix}{shard.key}"
    start = _fewer(shard.global_offset[axes:], each)
    inner = (base + more for base, more in zip(start, offset, strict=True))
    whole, global_offset = (1,) * axes + shape, (*shard.global_offset[:axes], *inner)
    found = ShardedTensor(
        key=key,
        data=values.view(whole),
        dtype=values.dtype,
        local_shape=whole,
        global_shape=_fewer(shard.global_shape, each),
        global_offset=global_offset,
        axis_fragmentations=None,
        replica_id=(*_replica(shard)[:2], dp_rank),
        allow_shape_mismatch=shard.allow_shape_mismatch and not prefix,
    )
    return {f"{key}{global_offset}": found}
