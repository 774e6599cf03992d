"""This rank's shards of all buckets, parameter by parameter: what they need beyond their bucket's reduction.

Some gradients are summed over more ranks than their bucket: those of sequence-parallel parameters over
tensor-parallel ranks, those of a tied embedding over the two stages that hold it. The norm counts each weight
of the model once, though several ranks hold a copy.
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
from patch.optimizer.param_buffer import ParamBuffer
from patch.optimizer.sharded_state import StateRange

_Key = TypeVar("_Key")


class OwnShards:
    """The parts of the trainable parameters that this rank updates.

    Args:
        parameters: all trainable ones; buckets refer to them by index. specs: what the layout knows of them.
        buckets: their gradients. param_buffer: their values.
        groups: dp_cp, tp, mp and embd are used.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        specs: Sequence[ParamSpec],
        buckets: Sequence[Bucket],
        param_buffer: ParamBuffer,
        groups: ProcessGroupCollection,
    ) -> None:
        self._parameters, self._specs, self._buckets, self._groups = parameters, specs, buckets, groups
        parts = [bucket.domain.own(bucket.range) for bucket in buckets]
        self._begins = [begin for begin, _ in parts]
        self._params = [b.range.params_within(*part) for b, part in zip(buckets, parts, strict=True)]
        self.shards = [
            BucketShard(bucket.shard, param_buffer.shard(bucket.index), self._ranges(bucket.index))
            for bucket in buckets
        ]
        """In the order of buckets."""
        self._sums: dict[int, torch.Tensor] = {}
        """By bucket: sums of squares of its parts, of the gradients that have arrived."""

    def forget_norms(self) -> None:
        """Gradients will be others."""
        self._sums = {}

    def start_norm(self, index: int) -> None:
        """Compute a bucket's part of the norm while other buckets travel: its reduction has arrived."""
        if not any(range_.needs_extra_reduction for range_ in self.shards[index].ranges):
            self._sums[index] = self._sums_of_squares(self._counted(index))

    def sum_over_model_parallel(self, clock: WaitClock) -> None:
        """Sum the gradients that need it over tensor-parallel ranks and over the stages of a tied embedding.

        Args:
            clock: gets the time that compute waits.
        """
        if self._groups.tp.size() > 1:
            self._sum_sequence_parallel(clock)
        for bucket in self._buckets:
            for param in bucket.range.params[:1]:  # a tied embedding is alone in its bucket
                if _is_tied(self._parameters[param.parameter]):
                    with clock.waiting():
                        dist.all_reduce(bucket.shard, group=self._groups.embd)

    def _sum_sequence_parallel(self, clock: WaitClock) -> None:
        """In one message."""
        parts = [
            self._grad(index, param)
            for index, param in self._all()
            if _is_sequence_parallel(self._parameters[param.parameter])
        ]
        if parts:
            coalesced = torch.cat(parts)
            with clock.waiting():
                dist.all_reduce(coalesced, group=self._groups.tp)
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
        grad = self.shards[0].grad
        return sums_of_squares(parts) if parts else grad.new_empty(0, dtype=torch.float64)

    def _counted(self, index: int) -> list[torch.Tensor]:
        """The gradients of a bucket that this rank counts in the norm."""
        is_counted = partial(self._is_counted, self._buckets[index].domain)
        merged = _merge(self._params[index], is_counted)
        return [self._grad(index, param) for is_counted_here, param in merged if is_counted_here]

    def _ranges(self, index: int) -> list[ShardRange]:
        begin = self._begins[index]
        return [
            ShardRange(merged.begin - begin, merged.end - begin, *treatment)
            for treatment, merged in _merge(self._params[index], self._treatment)
        ]

    def _treatment(self, param: ParamRange) -> tuple[int, bool]:
        """The group of a parameter, and whether its gradient is summed over more ranks than the bucket."""
        parameter = self._parameters[param.parameter]
        is_summed_over_tp = self._groups.tp.size() > 1 and _is_sequence_parallel(parameter)
        return self._specs[param.parameter].group, is_summed_over_tp or _is_tied(parameter)

    def _is_counted(self, domain: Domain, param: ParamRange) -> bool:
        """Whether this rank counts a parameter in the norm, of the model-parallel ranks that hold a copy."""
        parameter = self._parameters[param.parameter]
        has_other_ranks = domain.group is not self._groups.dp_cp  # all that hold a copy are in its group
        is_cut = has_other_ranks or getattr(parameter, "tensor_model_parallel", False)
        return not getattr(parameter, "shared", False) and (is_cut or self._groups.tp.rank() == 0)


def _is_sequence_parallel(parameter: torch.nn.Parameter) -> bool:
    """Whether each tensor-parallel rank saw a part of the tokens (megatron-core's mark)."""
    return getattr(parameter, "sequence_parallel", False)


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
