"""Weights of which a rank keeps its shards only (ZeRO stage `parameters`).

A unit (param_units.py) has one memory for ever, and its parameters are views of it while it is gathered. To
free it takes the bytes from the memory, not the memory from the tensors: what autograd saved of a parameter
in forward, a transposed view perhaps, finds the bytes that are gathered again for backward. A parameter that
is freed shows NaN to whoever reads it.

On CUDA memory is taken and given back in the order of the compute stream, for which every gather waits as it
starts. Compute waits for the gather before it reads, so no memory is written while somebody needs it.

Source: the memory that is resized is the idea of torch's first FSDP
(torch/distributed/fsdp/_flat_param.py, _free_storage).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, groupby
from typing import NamedTuple

import torch

from patch.compat.torch_internals import region
from patch.distributed.async_collectives import Pending, WaitClock, start_all_gather
from patch.optimizer.domain import FlatLayout
from patch.optimizer.param_flat import ApartFlat


class _Run(NamedTuple):
    """Neighbouring buckets of a domain that come and go together."""

    begin: int
    """Of the first of them, in the domain."""
    buckets: list[int]
    memory: torch.Tensor
    """(n,) their parameters, or nothing while these are freed."""
    views: list[tuple[torch.nn.Parameter, torch.Tensor]]
    """Each parameter's place in it."""


class ShardedFlat(ApartFlat):
    """The parameters of a domain, of which a rank keeps its shards; those without a unit stay gathered."""

    form = "in shards (--data-parallel-sharding parameters)"

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        super().__init__(layout, number, clock)
        whole, self.buffer = self.buffer, self._own
        self._runs: dict[int, list[_Run]] = {}
        """By unit: one each, but for those that stay."""
        for unit, group in groupby(self._ranges, lambda index: self._ranges[index].unit):
            buckets = list(group)
            begin, end = self._ranges[buckets[0]].begin, self._ranges[buckets[-1]].end
            memory = whole.new_zeros(end - begin)
            views = [
                (parameter, memory[start - begin :][: parameter.numel()].view(parameter.shape))
                for parameter, start in zip(self.parameters, self._begins.values(), strict=True)
                if begin <= start < end
            ]
            if unit:
                memory.untyped_storage().resize_(0)
            self._runs.setdefault(unit, []).append(_Run(begin, buckets, memory, views))
        self._is_described = False
        self._nothing = whole.new_full((), math.nan)

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's shards, and of what stays gathered."""
        return self._own.nbytes + sum(run.memory.nbytes for run in self._runs.get(0, []))

    def start_gather(self, index: int) -> Pending | None:
        """Send this rank's part of an updated bucket that stays gathered; units travel when needed."""
        if self._ranges[index].unit:
            return None
        with region("bucket %d all-gather", index):
            run = next(run for run in self._runs[0] if index in run.buckets)
            return start_all_gather(self._part(run, index), self.shard(index), self._domain.instance)

    def start_unit(self, unit: int) -> list[Pending]:
        """Gather a unit's parameters, which are to be read when that has been waited for."""
        gathers = []
        assert self._domain.gathers is not None, "made with the layout"
        for run in self._runs.get(unit, []):
            for index in run.buckets:
                with region("bucket %d all-gather", index):
                    part = self._part(run, index)
                    gathers.append(start_all_gather(part, self.shard(index), self._domain.gathers))
        return gathers

    def give_memory(self, unit: int) -> None:
        """Let the parameters of a unit have memory, without values."""
        for run in self._runs.get(unit, []):
            run.memory.untyped_storage().resize_(run.memory.nbytes)
            for parameter, view in run.views:
                parameter.data = view
            self._trained.note(parameter for parameter, _ in run.views)

    def free(self, unit: int) -> None:
        """Take the memory of a unit, whose gathers have arrived."""
        for run in self._runs.get(unit, []):
            for parameter, _ in run.views:
                parameter.data = self._nothing.expand(parameter.shape)
            self._trained.note(parameter for parameter, _ in run.views)
            run.memory.untyped_storage().resize_(0)

    def describe(self) -> None:
        """Give parameters in shards their places, without memory: only shapes and offsets may be read."""
        self.leave_whole()
        self._is_described = True
        for run in self._of_units():
            for parameter, view in run.views:
                parameter.data = view

    @torch.no_grad()
    def end_description(self) -> None:
        """Whoever read them may have loaded parameters: of those that stay gathered these are new shards."""
        self._is_described = False
        for run in self._runs.get(0, []):
            for index in run.buckets:
                begin, end = self._domain.own(self._ranges[index])
                self.shard(index).copy_(run.memory[begin - run.begin : end - run.begin])
        for unit in self._runs:
            if unit:
                self.free(unit)

    def check_whole(self) -> None:
        """Refuse to read or write parameters that are not whole, unless only their places are wanted.

        Raises:
            TrainingError: they are not.
        """
        if not self._is_described:
            super().check_whole()

    def in_shards(self) -> Iterator[torch.nn.Parameter]:
        """The parameters that do not stay gathered."""
        return (parameter for run in self._of_units() for parameter, _ in run.views)

    def _of_units(self) -> Iterator[_Run]:
        return chain.from_iterable(runs for unit, runs in self._runs.items() if unit)

    @torch.no_grad()
    def leave_whole(self) -> None:
        """Keep this rank's shards of what weights hold now, the same on all ranks."""
        if self._whole is None:
            return
        self.store_whole()
        for unit, runs in self._runs.items():
            for run in runs if unit == 0 else ():
                run.memory.copy_(self._whole[run.begin : run.begin + run.memory.numel()])
                for parameter, view in run.views:
                    parameter.data = view
                self._trained.note(parameter for parameter, _ in run.views)
            if unit:
                self.free(unit)
        self._whole = None

    def _part(self, run: _Run, index: int) -> torch.Tensor:
        """A bucket's place in its run."""
        bucket_range = self._ranges[index]
        return run.memory[bucket_range.begin - run.begin : bucket_range.end - run.begin]
