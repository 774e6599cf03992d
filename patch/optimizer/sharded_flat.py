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
from patch.device import streams_of
from patch.distributed.async_collectives import Pending, WaitClock, queued_on, start_all_gather
from patch.memory import SimulatedDevice, host_zeros
from patch.optimizer.domain import FlatLayout
from patch.optimizer.param_flat import ApartFlat
from patch.optimizer.sharded_state import StateRange


def resize_memory(tensor: torch.Tensor, num_bytes: int) -> None:
    """Give a tensor's memory so many bytes, without values, whatever views it has; 0: take it."""
    tensor.untyped_storage().resize_(num_bytes)


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
        self.buffer = self._own
        self._device, dtype = layout.held.device, self._own.dtype
        self._runs: dict[int, list[_Run]] = {}
        """By unit: one each, but for those that stay."""
        for unit, group in groupby(self._ranges, lambda index: self._ranges[index].unit):
            buckets = list(group)
            begin, end = self._ranges[buckets[0]].begin, self._ranges[buckets[-1]].end
            memory = torch.empty(end - begin, dtype=dtype, device=self._device)
            views = [
                (parameter, memory[start - begin :][: parameter.numel()].view(parameter.shape))
                for parameter, start in zip(self.parameters, self._begins.values(), strict=True)
                if begin <= start < end
            ]
            if unit:
                resize_memory(memory, 0)
            self._runs.setdefault(unit, []).append(_Run(begin, buckets, memory, views))
        self._all_parameters, self._is_described = layout.held.parameters, False
        nothing = math.nan if dtype.is_floating_point else 0
        self._nothing = torch.full((), nothing, dtype=dtype, device=self._device)
        self.meter: SimulatedDevice | None = None
        """Counts the memory of units."""

    @property
    def num_bytes(self) -> int:
        """Bytes on the device of this rank's shards, and of what stays gathered."""
        own = 0 if self._domain.is_on_host else self._own.nbytes
        return own + sum(run.memory.nbytes for run in self._runs.get(0, []))

    def start_gather(self, index: int) -> Pending | None:
        """Send this rank's part of an updated bucket that stays gathered; units travel when needed."""
        if self._ranges[index].unit:
            return None
        with region("bucket %d all-gather", index):
            run = next(run for run in self._runs[0] if index in run.buckets)
            return start_all_gather(self._part(run, index), self.shard(index), self._domain.instance)

    def start_unit(self, unit: int) -> list[Pending]:
        """Gather a unit's parameters, which are to be read when that has been waited for."""
        gathers: list[Pending] = []
        streams = streams_of(self._device)
        for run in self._runs.get(unit, []):
            for index in run.buckets:
                with region("bucket %d all-gather", index):
                    part, own = self._part(run, index), self.shard(index)
                    if self._domain.is_on_host:
                        rank, size = self._domain.instance.rank(), self._domain.num_shards
                        own = part.chunk(size)[rank].copy_(own, non_blocking=True)
                    if self._domain.gathers is not None:
                        gathers.append(start_all_gather(part, own, self._domain.gathers))
            if self._domain.gathers is None:  # nobody else has a part
                gathers.append(queued_on(streams.current_stream(), self._device))
        return gathers

    def give_memory(self, unit: int) -> None:
        """Let the parameters of a unit have memory, without values."""
        for run in self._runs.get(unit, []):
            if self.meter is not None:
                self.meter.reserve(run.memory.nbytes)
            resize_memory(run.memory, run.memory.nbytes)
            for parameter, view in run.views:
                parameter.data = view
            self._trained.note(parameter for parameter, _ in run.views)

    def free(self, unit: int) -> None:
        """Take the memory of a unit, whose gathers have arrived."""
        for run in self._runs.get(unit, []):
            for parameter, _ in run.views:
                parameter.data = self._nothing.expand(parameter.shape)
            self._trained.note(parameter for parameter, _ in run.views)
            if self.meter is not None and run.memory.untyped_storage().nbytes():
                self.meter.release(run.memory.nbytes)
            resize_memory(run.memory, 0)

    @torch.no_grad()
    def gather_whole(self, whole: torch.Tensor) -> None:
        """Give parameters all elements, in host memory; the device holds one unit at a time."""
        for unit, runs in self._runs.items() if whole is not self._own else ():
            if unit:
                self.give_memory(unit)
                for gather in self.start_unit(unit):
                    gather.wait(self._clock)
            for run in runs:
                whole[run.begin : run.begin + run.memory.numel()].copy_(run.memory)
            if unit:
                self.free(unit)
        self._whole = whole
        self._point(whole)

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

    def new_whole(self) -> torch.Tensor | None:
        """Memory for `gather_whole`: of one shard it is that; None: parameters are whole."""
        return super().new_whole() if self.is_whole or self._domain.num_shards > 1 else self._own

    def _new_buffer(self, numel: int, device: torch.device) -> torch.Tensor:
        """(numel,) zeros on the host: the device may have no room for all parameters."""
        if self._domain.num_shards == 1:
            return host_zeros(numel, self._domain.dtype, device)
        return super()._new_buffer(numel, torch.device("cpu"))

    def _new_shards(self, numel: int, device: torch.device) -> torch.Tensor:
        """(numel,) memory for this rank's shards; a single one is all parameters."""
        if not self._domain.is_on_host:
            return super()._new_shards(numel, device)
        if self._domain.num_shards == 1:
            return self.buffer
        return host_zeros(numel, self._domain.dtype, device)

    def check_whole(self) -> None:
        """Refuse to read or write parameters that are not whole, unless only their places are wanted.

        Raises:
            TrainingError: they are not.
        """
        if not self._is_described:
            super().check_whole()

    def own_parts(self) -> Iterator[StateRange]:
        """This rank's parts of the parameters that do not stay gathered: views."""
        for run in self._of_units():
            for index in run.buckets:
                begin, end = self._domain.own(self._ranges[index])
                for param in self._ranges[index].params_within(begin, end):
                    values = self.shard(index)[param.begin - begin : param.end - begin]
                    yield StateRange(
                        self._all_parameters[param.parameter], param.offset, values, self._domain.replica
                    )

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
