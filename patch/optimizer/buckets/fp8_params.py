"""Weights that are gathered in fp8 (`--fp8-param-gather`).

Parameters whose attribute `gather_dtype` names an fp8 dtype form a separate buffer group. Its flat buffer
has one byte per weight. A rank's own shards, which the optimizer updates, are bf16 in separate memory. After
an update, ranks compute the absolute maximum of each weight together; each rank casts its shards, and the
fp8 values are all-gathered. The cast starts from bf16 weights. So the bits are those of a cast in the layer
with any sharding, and checkpoints hold exactly the trained weights.

A parameter is whole (bf16 in a second flat buffer) until the first step and after `gather_whole`. Otherwise
it is its fp8 values, with the attribute `scale_inv`, a float32 scalar.

At `PARAMETERS` a unit is gathered in fp8 for each pass. Its scales are computed in the first gather after an
update or after weights were written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from patch.compat.torch_internals import foreach_norm, region
from patch.distributed.async_collectives import CommHandle, WaitClock, start_all_reduce
from patch.errors import ConfigError
from patch.features.table import FP8_GATHER, HOST_STATES, refuse_pair
from patch.fp8 import cast, scale_inv_of
from patch.optimizer.buckets.buffer_group import BufferGroup, FlatLayout
from patch.optimizer.buckets.flat_params import DetachedFlatParams
from patch.optimizer.zero3.sharded_params import Zero3FlatParams


class _AmaxReduction:
    """An all-reduce of the absolute maxima of neighbouring parameters, whose positions are `members`.

    The maxima are int32 bits (n,). Non-negative floats have the same order as their bits; NaN is last.
    """

    def __init__(self, members: slice, bits: torch.Tensor, pending: CommHandle) -> None:
        self.members, self.bits, self.pending = members, bits, pending
        self.is_known = False


class Fp8GatheredParams(DetachedFlatParams):
    """The weights of a buffer group with a `gather_dtype` and several shards, all-gathered in fp8."""

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        super().__init__(layout, number, clock)
        assert self._buffer_group.gather_dtype is not None
        self._dtype = self._buffer_group.gather_dtype
        self._can_wait_elsewhere = self._like.is_cuda  # on a CUDA stream, other than the host or compute
        self._places = {index: place for place, index in enumerate(self._begins)}
        # cuBLAS needs scales at addresses that are multiples of 16 bytes.
        self._scale_inv = torch.ones(len(self._begins), 4, device=self._like.device)[:, 0]
        for parameter, scale_inv in zip(self.parameters, self._scale_inv, strict=True):
            parameter.scale_inv = scale_inv  # type: ignore[attr-defined]
            # Otherwise autograd would round gradients to fp8.
            parameter.grad_dtype = self._buffer_group.dtype

    def _start_search(self, indices: Sequence[int], group: dist.ProcessGroup) -> _AmaxReduction:
        """Start the all-reduce of each weight's absolute maximum, in buckets with all parts of weights."""
        found: dict[int, list[torch.Tensor]] = {}
        for index in indices:
            found |= {self._places[param.parameter]: [] for param in self._ranges[index].params}
        parts = [part for index in indices for part in self._own_parts(index)]
        for (place, _, _), norm in zip(parts, _largest([part for _, _, part in parts]), strict=True):
            found[place].append(norm)
        none = self._scale_inv.new_zeros(())  # if all of a weight is in other ranks' shards
        largest = [torch.stack(found[place]).amax() if found[place] else none for place in sorted(found)]
        bits = torch.stack(largest).view(torch.int32)
        pending = start_all_reduce(bits, group, dist.ReduceOp.MAX)
        return _AmaxReduction(slice(min(found), max(found) + 1), bits, pending)

    def _finish(self, round_: _AmaxReduction) -> None:
        if not round_.is_known:
            # With a GPU the host does not wait here: compute waits for the gather.
            round_.pending.wait(None if self._can_wait_elsewhere else self._clock)
            amax = round_.bits.view(torch.float32)
            self._scale_inv[round_.members].copy_(scale_inv_of(amax, self._dtype))
            round_.is_known = True

    def _round_own(self, index: int, own: torch.Tensor) -> None:
        """Write this rank's part of a bucket in fp8 to its place `own`; its scales are known."""
        for place, within, values in self._own_parts(index):
            own[within].view(self._dtype).copy_(cast(values, self._scale_inv[place], self._dtype))

    def _own_parts(self, index: int) -> list[tuple[int, slice, torch.Tensor]]:
        """Return the parameters in this rank's part of a bucket: index, place in the part, and values."""
        own, parts = self.shard(index), self._buffer_group.own_params(self._ranges[index])
        return [(self._places[param.parameter], within, own[within]) for param, within in parts]


class Fp8FlatParams(Fp8GatheredParams):
    """Parameters that are gathered in fp8 after an update.

    Ranks exchange data about whole parameters before a bucket is gathered (`prepare`). So all buckets with
    parts of one parameter must be updated together.
    """

    form = "in fp8 (--fp8-param-gather)"

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        super().__init__(layout, number, clock)
        self.buffer = torch.zeros_like(self.buffer, dtype=torch.uint8)
        self._rounds: dict[int, _AmaxReduction] = {}
        """The round of each bucket that was updated and is not gathered yet."""

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the fp8 weights and of this rank's shards."""
        return self.buffer.nbytes + self._own.nbytes

    def prepare(self, indices: Sequence[int]) -> None:
        """Start to find the absolute maximum of each weight in these neighbouring buckets.

        The buckets hold all parts of their weights; some are of other buffer groups.
        """
        indices = [index for index in indices if index in self._ranges]
        if any(self._ranges[index].params for index in indices):
            round_ = self._start_search(indices, self._buffer_group.shard_group)
            self._rounds |= dict.fromkeys(indices, round_)

    def is_prepared(self, index: int) -> bool:
        """Return whether the bucket's scales are known, or only compute waits for them."""
        return self._can_wait_elsewhere or index not in self._rounds or self._rounds[index].is_known

    def start_gather(self, index: int) -> CommHandle:
        """Cast this rank's part of a bucket and start its all-gather, on CUDA all on the current stream."""
        with region("bucket %d all-gather in 8 bits", index):
            if index in self._rounds:  # not a bucket of padding only
                self._finish(self._rounds.pop(index))
                self._round_own(index, self.buffer[self._buffer_group.own(self._ranges[index])])
            return self._start_gather(self.buffer, index)

    @torch.no_grad()
    def leave_whole(self) -> None:
        """Cast whole weights, which are equal on all ranks, to fp8, and free the whole buffer."""
        if not self.is_whole:
            return
        self.store_whole()
        weights = [parameter.detach() for parameter in self.parameters]
        self._scale_inv.copy_(scale_inv_of(torch.stack(_largest(weights)), self._dtype))
        values = self.buffer.view(self._dtype)
        for (weight, place), scale_inv in zip(self._views(values), self._scale_inv, strict=True):
            place.copy_(cast(weight, scale_inv, self._dtype))
        self._whole = None
        self._point(values)


class Fp8Zero3FlatParams(Zero3FlatParams, Fp8GatheredParams):
    """Parameters that are gathered in fp8 by units; a visited unit takes two bytes per weight."""

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        self._scaled = set[int]()
        super().__init__(layout, number, clock)

    def start_gather(self, index: int) -> None:
        """Record that a bucket has been updated."""
        self._scaled.discard(self._ranges[index].unit)

    def start_unit(self, unit: int, *, is_visited: bool = False) -> list[CommHandle]:
        """Cast this rank's part of a unit and gather it, on CUDA all on the current stream."""
        buckets = [index for run in self._runs.get(unit, []) for index in run.buckets]
        if buckets and not is_visited and unit not in self._scaled:
            assert self._buffer_group.all_gather_group is not None
            self._finish(self._start_search(buckets, self._buffer_group.all_gather_group))
            self._scaled.add(unit)
        return super().start_unit(unit, is_visited=is_visited)

    def _sent(self, index: int, place: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a bucket in fp8, written to its place in the gather."""
        if place.dtype != torch.uint8:
            return super()._sent(index, place)
        self._round_own(index, place)
        return place

    def store_whole(self) -> None:
        """Keep the values of whole parameters, which are equal on all ranks."""
        self._scaled.clear()
        super().store_whole()

    def end_placeholders(self) -> None:
        """End the description; parameters may have been loaded."""
        self._scaled.clear()
        super().end_placeholders()


def check_gathers(buffer_groups: Sequence[BufferGroup], *, is_offloading: bool) -> None:
    """Refuse weights gathered in fp8 whose shards are not ready after the device update.

    Raises:
        ConfigError: their states may go to the host, or they have separate masters (fp16).
    """
    rounded = [buffer_group for buffer_group in buffer_groups if buffer_group.gather_dtype is not None]
    if rounded and is_offloading:
        refuse_pair(HOST_STATES, FP8_GATHER, "static or auto")
    if any(buffer_group.dtype == torch.float16 for buffer_group in rounded):
        raise ConfigError(
            "got float16 weights with --fp8-param-gather, expected bfloat16 or float32: remove the flag or "
            "change --precision"
        )


def _largest(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the absolute maximum of each tensor in float32, or NaN if it contains NaN."""
    return list(foreach_norm(parts, math.inf, dtype=torch.float32)) if parts else []
