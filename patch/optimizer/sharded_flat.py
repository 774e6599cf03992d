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
from collections.abc import Iterator, Sequence
from itertools import chain, groupby
from typing import NamedTuple

import torch

from patch.compat.torch_internals import region
from patch.device import streams_of
from patch.distributed.async_collectives import Pending, WaitClock, queued_on, start_all_gather
from patch.memory import SimulatedDevice
from patch.optimizer.domain import FlatLayout
from patch.optimizer.param_flat import ApartFlat
from patch.optimizer.sharded_state import StateRange


def resize_memory(tensor: torch.Tensor, num_bytes: int) -> None:
    """Give a tensor's memory so many bytes, without values, whatever views it has; 0: take it."""
    tensor.untyped_storage().resize_(num_bytes)


def has_values(parameter: torch.Tensor) -> bool:
    """Whether a parameter has an element of its own for each number."""
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


class _Run(NamedTuple):
    """Neighbouring buckets of a domain that come and go together."""

    begin: int
    """The offset of the first of them in the domain."""
    buckets: list[int]
    memory: torch.Tensor
    """(n,) their parameters as they travel, or nothing while these are freed."""
    whole: torch.Tensor
    """(n,) the same memory for parameters in their own type."""
    views: list[tuple[torch.nn.Parameter, torch.Tensor]]
    """Each parameter's place in it."""


class ShardedFlat(ApartFlat):
    """The parameters of a domain, of which a rank keeps its shards; those without a unit stay gathered.

    Parameters that have no values yet (`has_values`) never get whole memory for them.
    """

    form = "in shards (--data-parallel-sharding parameters)"

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        super().__init__(layout, number, clock)
        self._all_parameters, self._is_described = layout.held.parameters, False
        seen_as = self._domain.gathered_as or self._like.dtype
        nothing = self._like.new_full((), math.nan if self._like.is_floating_point() else 0)
        self._nothing = nothing.to(seen_as)
        self.meter: SimulatedDevice | None = None
        """Counts the memory of units."""
        self._runs: dict[int, list[_Run]] = {}
        """By unit: one each, but for those that stay."""
        for unit, group in groupby(self._ranges, lambda index: self._ranges[index].unit):
            buckets = list(group)
            begin, end = self._ranges[buckets[0]].begin, self._ranges[buckets[-1]].end
            whole = self._like.new_zeros(end - begin)
            memory = whole if self._domain.gathered_as is None else whole.view(torch.uint8)[: whole.numel()]
            seen = memory.view(seen_as)
            views = [
                (parameter, seen[start - begin :][: parameter.numel()].view(parameter.shape))
                for parameter, start in zip(self.parameters, self._begins.values(), strict=True)
                if begin <= start < end
            ]
            run = _Run(begin, buckets, memory, whole, views)
            if unit:
                self._resize(memory, 0)
            self._runs.setdefault(unit, []).append(run)
            if not self.is_whole:
                self._show(run, is_here=not unit)
        self.buffer = self._own

    def _take_over(self, numel: int) -> torch.Tensor:
        """(numel,) the values of the parameters, which become views; (0,) if they have none."""
        is_new = not any(map(has_values, self.parameters))
        return self._like.new_zeros(0) if is_new else super()._take_over(numel)

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
            part = self._part(run, index, run.memory)
            return start_all_gather(part, self.shard(index), self._domain.instance)

    def start_unit(self, unit: int, *, is_visited: bool = False) -> list[Pending]:
        """Gather a unit's parameters, which are to be read when that has been waited for.

        Args:
            unit: which has memory.
            is_visited: whether they are gathered in their own type, however they travel otherwise.
        """
        gathers: list[Pending] = []
        group, device = self._domain.gathers, self._like.device
        for run in self._runs.get(unit, []):
            memory = run.whole if is_visited else run.memory
            for index in run.buckets:
                with region("bucket %d all-gather", index):
                    own = self._sent(index, self._own_place(run, index, memory))
                    if group is not None:
                        gathers.append(start_all_gather(self._part(run, index, memory), own, group))
            if group is None:  # nobody else has a part
                gathers.append(queued_on(streams_of(device).current_stream(), device))
        return gathers

    def _sent(self, index: int, place: torch.Tensor) -> torch.Tensor:
        """This rank's shard of a bucket, which has a `place` where it is gathered."""
        own = self.shard(index)
        return place.copy_(own, non_blocking=True) if self._domain.is_on_host else own

    def give_memory(self, unit: int) -> None:
        """Let the parameters of a unit have memory, without values."""
        for run in self._runs.get(unit, []):
            self._resize(run.memory, run.memory.nbytes)
            self._show(run, is_here=True)

    def free(self, unit: int) -> None:
        """Take the memory of a unit, whose gathers have arrived."""
        for run in self._runs.get(unit, []):
            self._show(run, is_here=False)
            self._resize(run.memory, 0)

    def _resize(self, memory: torch.Tensor, num_bytes: int) -> None:
        """Give a unit's memory its bytes, or take them (0)."""
        if self.meter is not None:
            self.meter.reserve(num_bytes - memory.untyped_storage().nbytes())
        resize_memory(memory, num_bytes)

    def _show(self, run: _Run, *, is_here: bool) -> None:
        """Let parameters be their places, or NaN."""
        for parameter, view in run.views:
            parameter.data = view if is_here else self._nothing.expand(parameter.shape)
        self._held.note(parameter for parameter, _ in run.views)

    def describe(self) -> dict[int, tuple[int, _Run]]:
        """Give parameters in shards places in memory of the host that nobody touches: only these may be read.

        Returns:
            unit and buckets of each place, by the identity of its memory.
        """
        self.leave_whole()
        self._is_described = True
        found = {}
        for unit in self.units:
            for run in self._runs[unit]:
                place = torch.empty(0, dtype=self._like.dtype).set_(torch.UntypedStorage(run.whole.nbytes))  # type: ignore[call-overload]
                found[place.untyped_storage()._cdata] = unit, run
                for parameter, view in run.views:
                    parameter.data = place.as_strided(view.shape, view.stride(), view.storage_offset())
        return found

    @torch.no_grad()
    def end_description(self) -> None:
        """Whoever read them may have loaded parameters: of those that stay gathered these are new shards."""
        self._is_described = False
        for run in self._runs.get(0, []):
            for own, place in self._own_places(run):
                own.copy_(place)
        for unit in self._runs:
            if unit:
                self.free(unit)

    @property
    def units(self) -> list[int]:
        """The units that are gathered and freed."""
        return [unit for unit in self._runs if unit]

    def unit_bytes(self, unit: int) -> int:
        """Bytes of a unit while it is here."""
        return sum(run.memory.nbytes for run in self._runs.get(unit, []))

    @torch.no_grad()
    def begin_visit(self, unit: int, *, is_writing: bool) -> None:
        """Give a unit that is described memory, with all its values, or this rank's shards alone."""
        for run in self._runs[unit]:
            self._resize(run.whole, run.whole.nbytes)
            for own, place in self._own_places(run) if is_writing else ():
                place.copy_(own)
        for gather in () if is_writing else self.start_unit(unit, is_visited=True):
            gather.wait(self._clock)

    @torch.no_grad()
    def end_visit(self, unit: int, *, is_writing: bool) -> None:
        """Take the memory, and keep what was written to it."""
        for run in self._runs[unit]:
            for own, place in self._own_places(run) if is_writing else ():
                own.copy_(place)
            self._resize(run.memory, 0)

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

    def in_shards(self) -> Iterator[torch.nn.Parameter]:
        """The parameters that do not stay gathered."""
        return (parameter for run in self._of_units() for parameter, _ in run.views)

    def _own_places(self, run: _Run) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's shards of a run's buckets, each with its place in the whole run."""
        for index in run.buckets:
            yield self.shard(index), self._own_place(run, index, run.whole)

    def _own_place(self, run: _Run, index: int, memory: torch.Tensor) -> torch.Tensor:
        """The place of this rank's shard in a memory of a run."""
        begin, end = self._domain.own(self._ranges[index])
        return memory[begin - run.begin : end - run.begin]

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
                self._show(run, is_here=True)
            if unit:
                self.free(unit)
        self._whole = None

    def _part(self, run: _Run, index: int, memory: torch.Tensor) -> torch.Tensor:
        """A bucket's place in a memory of its run."""
        bucket_range = self._ranges[index]
        return memory[bucket_range.begin - run.begin : bucket_range.end - run.begin]


class UnitVisits:
    """Parameters in shards, whole one unit at a time while they are described.

    Args:
        flats: are described by it.
        is_writing: what visitors write is kept, the same on all ranks; otherwise they read, and every visit
            is a collective.
        device: of the parameters.
    """

    def __init__(self, flats: Sequence[ShardedFlat], device: torch.device, *, is_writing: bool) -> None:
        self._is_writing, self.device = is_writing, device
        self._places = {memory: (flat, *place) for flat in flats for memory, place in flat.describe().items()}
        self._open: tuple[ShardedFlat, int] | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Where a described parameter, or a view of one, is whole until another unit is visited."""
        found = self._places.get(tensor.untyped_storage()._cdata)
        if found is None:
            return tensor
        flat, unit, run = found
        if self._open != (flat, unit):
            self.end()
            flat.begin_visit(unit, is_writing=self._is_writing)
            self._open = flat, unit
        return run.whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def end(self) -> None:
        """Nobody visits any more."""
        if self._open is not None:
            (flat, unit), self._open = self._open, None
            flat.end_visit(unit, is_writing=self._is_writing)
