"""This rank's shards of all buckets, parameter by parameter: what they need beyond their bucket's reduction.

Some gradients are summed over more ranks than their bucket: those of sequence-parallel parameters over
tensor-parallel ranks, those of a tied embedding over the two stages that hold it. The norm counts each weight
of the model once, though several ranks hold a copy. Experts that are distributed have tensor-parallel ranks
of their own. Any other data-parallel group of a ParamGroup has all ranks that hold a copy.
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
from patch.distributed.async_collectives import WaitClock
from patch.layout.buckets import ParamRange, ParamSpec
from patch.optimizer.bucket import Bucket
from patch.optimizer.chunk import BucketShard, ShardRange
from patch.optimizer.domain import Domain
from patch.optimizer.kernels import sums_of_squares
from patch.optimizer.kernels.narrow import Draw
from patch.optimizer.param_buffer import ParamBuffer
from patch.optimizer.sharded_state import StateRange

_Key = TypeVar("_Key")


class OwnShards:
    """The parts of the trainable parameters that this rank updates.

    Args:
        parameters: all trainable ones; buckets refer to them by index. specs: what the layout knows of them.
        buckets: their gradients. param_buffer: their values.
        groups: dp_cp, tp, mp and embd are used; of distributed experts also expt_dp and expt_tp.
        device: that of this rank; shards may lie in host memory.
        draws: of each parameter, by its index: the parts that it has of whole weights, with the first element
            of each; None: no moment is rounded stochastically.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        buckets: Sequence[Bucket],
        param_buffer: ParamBuffer,
        groups: ProcessGroupCollection,
        device: torch.device,
        draws: Sequence[Sequence[tuple[int, Draw]]] | None = None,
    ) -> None:
        self._parameters, self._specs, self._buckets, self._groups = parameters, specs, buckets, groups
        self._device, self._draws = device, draws
        parts = [bucket.domain.own(bucket.range) for bucket in buckets]
        self._begins = [begin for begin, _ in parts]
        self._params = [b.range.params_within(*part) for b, part in zip(buckets, parts, strict=True)]
        self._tp_groups = [_tp_group(bucket.domain, groups) for bucket in buckets]
        self.shards = [
            BucketShard(
                bucket.shard, param_buffer.flat_of(index).shard(index), self._ranges(index),
                bucket.domain.is_on_host,
            )
            for index, bucket in enumerate(buckets)
        ]  # fmt: skip
        """In the order of buckets."""
        self._sums: dict[int, torch.Tensor] = {}
        """By bucket: sums of squares of its parts, of the gradients that have arrived."""

    def forget_norms(self) -> None:
        """Gradients will be others."""
        self._sums = {}

    def start_norm(self, index: int) -> None:
        """Compute a bucket's part of the norm while other buckets travel: its reduction has arrived."""
        shard = self.shards[index]  # in host memory the gradient itself is still on its way
        if not (shard.is_on_host or any(range_.needs_extra_reduction for range_ in shard.ranges)):
            self._sums[index] = self._sums_of_squares(self._counted(index))

    def sum_over_model_parallel(self, clock: WaitClock) -> None:
        """Sum the gradients that need it over tensor-parallel ranks and over the stages of a tied embedding.

        Args:
            clock: gets the time that compute waits.
        """
        for group in (self._groups.tp, getattr(self._groups, "expt_tp", None)):  # the same order on all ranks
            self._sum_sequence_parallel(group, clock)
        for bucket in self._buckets:
            for param in bucket.range.params[:1]:  # a tied embedding is alone in its bucket
                if _is_tied(self._parameters[param.parameter]):
                    with clock.waiting():
                        total = bucket.shard.to(self._device)
                        dist.all_reduce(total, group=self._groups.embd)
                        if total is not bucket.shard:
                            bucket.shard.copy_(total)

    def _sum_sequence_parallel(self, group: dist.ProcessGroup | None, clock: WaitClock) -> None:
        """In one message to the tensor-parallel ranks of these parameters."""
        parts = [
            self._grad(index, param)
            for index, param in self._all()
            if self._tp_groups[index] is group and self._is_summed_over_tp(index, param)
        ]
        if parts:
            coalesced = torch.cat([part.to(self._device) for part in parts])
            with clock.waiting():
                dist.all_reduce(coalesced, group=group)
            for part, summed in zip(parts, coalesced.split([part.numel() for part in parts]), strict=True):
                part.copy_(summed)

    def grad_norm(self, group: dist.ProcessGroup | None) -> float:
        """L2 norm of the gradients of the whole model; sums are in float64.

        Args:
            group: the ranks that hold one replica of it; None: all ranks, where the first replica of each
                parameter counts.
        """
        buckets = enumerate(self._buckets)
        counted = [i for i, bucket in buckets if group is not None or bucket.domain.replica == 0]
        if any(bucket.domain.is_on_host for bucket in self._buckets):
            torch.zeros((), device=self._device).item()  # waits for this stream, and so for their last copies
        late = {index: self._counted(index) for index in counted if index not in self._sums}
        sums = self._sums_of_squares(list(chain.from_iterable(late.values())))
        by_bucket = self._sums | dict(zip(late, sums.split(list(map(len, late.values()))), strict=True))
        nothing = self._sums_of_squares([])
        total = torch.cat([nothing, *(by_bucket[index] for index in counted)]).sum()
        self.forget_norms()
        with region("wait for the gradient norm"):
            dist.all_reduce(total, group=group)
            return total.sqrt().item()

    def state_ranges(
        self, state: Callable[[int, int, int], Iterator[tuple[int, torch.Tensor]]]
    ) -> Iterator[StateRange]:
        """Parts of a state.

        Args:
            state: views of the state of elements [begin, end) of shard `index`, each with its first element.
        """
        for index, param in self._all():
            begin, end = param.begin - self._begins[index], param.end - self._begins[index]
            for first, values in state(index, begin, end):
                parameter, replica = self._parameters[param.parameter], self._buckets[index].domain.replica
                yield StateRange(parameter, param.offset + first - begin, values, replica)

    def gradients(self, index: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """The final gradients of a part of a shard, as a state of `state_ranges`."""
        yield begin, self.shards[index].grad[begin:end]

    def _all(self) -> Iterator[tuple[int, ParamRange]]:
        """Each parameter's part, with the index of its bucket."""
        for index, params in enumerate(self._params):
            for param in params:
                yield index, param

    def _grad(self, index: int, param: ParamRange) -> torch.Tensor:
        begin = self._begins[index]
        return self.shards[index].grad[param.begin - begin : param.end - begin]

    def _sums_of_squares(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The sum of each part, in float64, where there may be none."""
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

    def _counted(self, index: int) -> list[torch.Tensor]:
        """The gradients of a bucket that this rank counts in the norm."""
        merged = _merge(self._params[index], partial(self._is_counted, index))
        return [self._grad(index, param) for is_counted_here, param in merged if is_counted_here]

    def _ranges(self, index: int) -> list[ShardRange]:
        begin, treatment = self._begins[index], partial(self._treatment, index)
        if self._draws is None:
            return [
                ShardRange(merged.begin - begin, merged.end - begin, *treated)
                for treated, merged in _merge(self._params[index], treatment)
            ]
        found = []
        for param in self._params[index]:
            parts, end = self._draws[param.parameter], param.offset + param.end - param.begin
            place = param.begin - begin - param.offset  # of the parameter's first element, in the shard
            for (start, draw), stop in zip(parts, [*(start for start, _ in parts[1:]), end], strict=True):
                first, last = max(param.offset, start), min(end, stop)
                if first < last:
                    drawn = draw._replace(skip=first - start)
                    found.append(ShardRange(place + first, place + last, *treatment(param), drawn))
        return found

    def _treatment(self, index: int, param: ParamRange) -> tuple[int, bool]:
        """The group of a parameter, and whether its gradient is summed over more ranks than the bucket."""
        is_tied = _is_tied(self._parameters[param.parameter])
        return self._specs[param.parameter].group, is_tied or self._is_summed_over_tp(index, param)

    def _is_summed_over_tp(self, index: int, param: ParamRange) -> bool:
        """Whether each of its tensor-parallel ranks saw a part of the tokens (megatron-core's mark)."""
        group = self._tp_groups[index]
        is_marked = getattr(self._parameters[param.parameter], "sequence_parallel", False)
        return is_marked and group is not None and group.size() > 1

    def _is_counted(self, index: int, param: ParamRange) -> bool:
        """Whether this rank counts a parameter in the norm, of the model-parallel ranks that hold a copy."""
        parameter, group = self._parameters[param.parameter], self._tp_groups[index]
        is_cut = getattr(parameter, "tensor_model_parallel", False)
        return not getattr(parameter, "shared", False) and (is_cut or group is None or group.rank() == 0)


def _tp_group(domain: Domain, groups: ProcessGroupCollection) -> dist.ProcessGroup | None:
    """The tensor-parallel ranks of a domain's parameters; None: all that hold a copy are in its group."""
    if domain.group is groups.dp_cp:
        return groups.tp
    return groups.expt_tp if domain.group is getattr(groups, "expt_dp", None) else None


def _is_tied(parameter: torch.nn.Parameter) -> bool:
    """Whether the first and the last pipeline stage hold it (megatron-core's mark)."""
    return getattr(parameter, "shared_embedding", False)


def _merge(params: list[ParamRange], key: Callable[[ParamRange], _Key]) -> list[tuple[_Key, ParamRange]]:
    """Neighbouring ranges with the same key as one."""
    merged = []
    for value, group in groupby(params, key):
        members = list(group)
        merged.append((value, members[0]._replace(end=members[-1].end)))
    return merged
