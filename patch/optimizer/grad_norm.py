"""This rank's shards of all buckets by parameter: reductions beyond the bucket's, and the gradient norm.

Some gradients are summed over more ranks than their bucket. Gradients of sequence-parallel parameters are
summed over tensor-parallel ranks, and those of a tied embedding over its two stages. The norm counts each
weight of the model once, although several ranks hold a copy. Distributed experts have separate
tensor-parallel groups. Any other data-parallel group of a ParamGroup contains all ranks that hold a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from typing import TypeVar

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.compat.torch_internals import region
from patch.device import stream_of, streams_of
from patch.distributed.async_collectives import CommHandle, WaitClock
from patch.layout.buckets import ParamRange
from patch.optimizer.buckets.bucket import Bucket
from patch.optimizer.buckets.buffer_group import BufferGroup, FlatLayout
from patch.optimizer.buckets.param_buffer import ParamBuffer
from patch.optimizer.kernels import sums_of_squares
from patch.optimizer.kernels.low_bit_moments import RngCoords
from patch.optimizer.states.chunk import BucketShard, ShardRange
from patch.optimizer.states.sharded_state import StateRange

_Key = TypeVar("_Key")


class GradNorm:
    """The parts of the trainable parameters that this rank updates.

    Args:
        layout: the layout of the trainable parameters.
        groups: dp_cp, tp, mp and embd are used; with distributed experts also expt_dp and expt_tp.
        draws: for each parameter, the parts of whole weights that it contains, each with its first element,
            as coordinates of random numbers. None: no moment is rounded stochastically.
    """

    def __init__(
        self,
        layout: FlatLayout,
        buckets: Sequence[Bucket],
        param_buffer: ParamBuffer,
        groups: ProcessGroupCollection,
        draws: Sequence[Sequence[tuple[int, RngCoords]]] | None = None,
    ) -> None:
        self._parameters, self._specs, self._device = layout.held.parameters, layout.specs, layout.held.device
        self._buckets, self._groups, self._draws = buckets, groups, draws
        self._param_groups = layout.held.groups
        self._params = [bucket.buffer_group.own_params(bucket.range) for bucket in buckets]
        """For each bucket: the parts of parameters in the shard, and their places there."""
        self._tp_groups = [_tp_group(bucket.buffer_group, groups) for bucket in buckets]
        self.shards = [
            BucketShard(
                bucket.shard, param_buffer.flat_of(index).shard(index), self._ranges(index),
                bucket.buffer_group.is_on_host,
            )
            for index, bucket in enumerate(buckets)
        ]  # fmt: skip
        self.forget_norms()
        self._streams, self._aside = streams_of(self._device), stream_of(self._device, "norms")

    def forget_norms(self) -> None:
        """Drop the norm, and that of buckets, before new gradients."""
        self._sums: dict[int, torch.Tensor] = {}
        """Sums of squares of each bucket whose norm was started, by bucket index."""
        self._total: torch.Tensor | None = None
        """The sum of squares of the whole model, or None before `start_total`."""

    def start_norm(self, index: int, after: CommHandle | None) -> None:
        """Compute the norm of a bucket beside backward, when its reduction `after` (None: it has) ends."""
        shard = self.shards[index]  # the copy of the gradient to host memory may be in flight
        if shard.is_on_host or any(range_.needs_extra_reduction for range_ in shard.ranges):
            return
        self._aside.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._aside):
            if after is not None:
                after.wait_stream()
            self._sums[index] = self._sums_of_squares(self._grads_in_norm(index))

    def sum_over_model_parallel(self, clock: WaitClock) -> None:
        """Sum gradients over tensor-parallel ranks and the stages of a tied embedding, where needed."""
        for group in (self._groups.tp, getattr(self._groups, "expt_tp", None)):  # the same order on all ranks
            self._sum_sequence_parallel(group, clock)
        for bucket in self._buckets:
            for param in bucket.range.params[:1]:  # a tied embedding has its own bucket
                if _is_tied(self._parameters[param.parameter]):
                    with clock.waiting():
                        total = bucket.shard.to(self._device)
                        dist.all_reduce(total, group=self._groups.embd)
                        if total is not bucket.shard:
                            bucket.shard.copy_(total)

    def _sum_sequence_parallel(self, group: dist.ProcessGroup | None, clock: WaitClock) -> None:
        parts = [
            self.shards[index].grad[place]
            for index, param, place in self._all()
            if self._tp_groups[index] is group and self._is_summed_over_tp(index, param)
        ]
        if parts:
            coalesced = torch.cat([part.to(self._device) for part in parts])
            with clock.waiting():
                dist.all_reduce(coalesced, group=group)
            for part, summed in zip(parts, coalesced.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed)

    def start_total(self, group: dist.ProcessGroup | None) -> None:
        """Start the sum of squares of the final gradients of the whole model, in float64.

        Args:
            group: the ranks that hold one replica of the model; None: all ranks, counting replica 0.
        """
        self._streams.current_stream().wait_stream(self._aside)
        buckets = enumerate(self._buckets)
        counted = [i for i, bucket in buckets if group is not None or bucket.buffer_group.replica == 0]
        if any(bucket.buffer_group.is_on_host for bucket in self._buckets):
            torch.zeros((), device=self._device).item()  # waits for this stream's copies to the host
        late = {index: self._grads_in_norm(index) for index in counted if index not in self._sums}
        sums = self._sums_of_squares(list(chain.from_iterable(late.values())))
        by_bucket = self._sums | dict(zip(late, sums.split(list(map(len, late.values()))), strict=True))
        nothing = self._sums_of_squares([])
        total = torch.cat([nothing, *(by_bucket[index] for index in counted)]).sum()
        if dist.get_world_size(group) > 1:
            dist.all_reduce(total, group=group)
        self._total = total

    def grad_norm(self, group: dist.ProcessGroup | None) -> float:
        """Return the L2 norm of the gradients of the whole model; see `start_total`."""
        with region("wait for the gradient norm"):
            if self._total is None:
                self.start_total(group)
            assert self._total is not None
            norm = self._total.sqrt().item()
        self.forget_norms()
        return norm

    def state_ranges(
        self, state: Callable[[int, int, int], Iterator[tuple[int, torch.Tensor]]]
    ) -> Iterator[StateRange]:
        """Yield the parts of a state; `state` yields views of a shard's range, with first elements."""
        for index, param, place in self._all():
            parameter, replica = self._parameters[param.parameter], self._buckets[index].buffer_group.replica
            for first, values in state(index, place.start, place.stop):
                yield StateRange(parameter, param.offset + first - place.start, values, replica)

    def gradients(self, index: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the final gradients of a part of a shard, as a state of `state_ranges`."""
        yield begin, self.shards[index].grad[begin:end]

    def _all(self) -> Iterator[tuple[int, ParamRange, slice]]:
        for index, params in enumerate(self._params):
            for param, place in params:
                yield index, param, place

    def _sums_of_squares(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if not parts:
            return torch.empty(0, dtype=torch.float64, device=self._device)
        found: dict[int, torch.Tensor] = {}
        places = {part.device for part in parts}
        for place in sorted(places, key=lambda place: place.type == "cpu"):  # the device works meanwhile
            there = [index for index, part in enumerate(parts) if part.device == place]
            sums = sums_of_squares([parts[index] for index in there]).to(self._device, non_blocking=True)
            if len(places) == 1:
                return sums
            found |= zip(there, sums.unbind(), strict=True)
        return torch.stack([found[index] for index in range(len(parts))])

    def _grads_in_norm(self, index: int) -> list[torch.Tensor]:
        merged, grad = _merge(self._params[index], partial(self._is_in_norm, index)), self.shards[index].grad
        return [grad[place] for is_counted_here, place in merged if is_counted_here]

    def _ranges(self, index: int) -> list[ShardRange]:
        treatment = partial(self._treatment, index)
        if self._draws is None:
            merged = _merge(self._params[index], treatment)
            return [ShardRange(place.start, place.stop, *treated) for treated, place in merged]
        found = []
        for param, place in self._params[index]:
            parts, end = self._draws[param.parameter], param.offset + param.end - param.begin
            zero = place.start - param.offset  # place of the parameter's first element
            for (start, draw), stop in zip(parts, [*(start for start, _ in parts[1:]), end], strict=True):
                first, last = max(param.offset, start), min(end, stop)
                if first < last:
                    drawn = draw._replace(skip=first - start)
                    found.append(ShardRange(zero + first, zero + last, *treatment(param), drawn))
        return found

    def _treatment(self, index: int, param: ParamRange) -> tuple[int, bool]:
        """Return a parameter's group, and whether its gradient has another reduction after the bucket's."""
        group, is_tied = self._specs[param.parameter].group, _is_tied(self._parameters[param.parameter])
        is_late = is_tied or self._param_groups[group].orthogonalizes
        return group, is_late or self._is_summed_over_tp(index, param)

    def _is_summed_over_tp(self, index: int, param: ParamRange) -> bool:
        """Return whether each tensor-parallel rank saw a part of the tokens (megatron-core's mark)."""
        group = self._tp_groups[index]
        is_marked = getattr(self._parameters[param.parameter], "sequence_parallel", False)
        return is_marked and group is not None and group.size() > 1

    def _is_in_norm(self, index: int, param: ParamRange) -> bool:
        """Return whether this rank counts a parameter, among the model-parallel ranks with a copy."""
        parameter, group = self._parameters[param.parameter], self._tp_groups[index]
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        return not getattr(parameter, "shared", False) and (is_cut or group is None or group.rank() == 0)


def _tp_group(buffer_group: BufferGroup, groups: ProcessGroupCollection) -> dist.ProcessGroup | None:
    """Return the tensor-parallel ranks of a buffer group, or None if its group has all copies."""
    if buffer_group.group is groups.dp_cp:
        return groups.tp
    return groups.expt_tp if buffer_group.group is getattr(groups, "expt_dp", None) else None


def _is_tied(parameter: torch.nn.Parameter) -> bool:
    """Return whether the first and the last pipeline stage hold it (megatron-core's mark)."""
    return getattr(parameter, "shared_embedding", False)


def _merge(
    params: list[tuple[ParamRange, slice]], key: Callable[[ParamRange], _Key]
) -> Iterator[tuple[_Key, slice]]:
    for value, group in groupby(params, lambda param: key(param[0])):
        places = [place for _, place in group]
        yield value, slice(places[0].start, places[-1].stop)
