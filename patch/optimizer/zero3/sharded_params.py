"""Weights of which a rank keeps only its shards (ZeRO stage `parameters`).

Each unit (scheduler.py) has one storage forever, and its parameters are views of it while it is gathered.
Freeing a unit resizes the storage to 0; the tensors keep their storage. So a tensor that autograd saved in
forward, for example a transposed view, sees the values that are gathered again for backward. A freed
parameter reads as NaN.

On CUDA, memory is freed and allocated in the order of the compute stream. Every gather waits for the compute
stream when it starts, and compute waits for the gather before a read. So no memory in use is overwritten.

Source: resizing a storage is the idea of torch's first FSDP
(torch/distributed/fsdp/_flat_param.py, _free_storage).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch

from patch.compat.torch_internals import region
from patch.device import streams_of
from patch.distributed.async_collectives import CommHandle, WaitClock, queued_on, start_all_gather
from patch.memory.simulated_device import SimulatedDevice
from patch.optimizer.buckets.buffer_group import FlatLayout
from patch.optimizer.buckets.flat_params import DetachedFlatParams
from patch.optimizer.states.sharded_state import StateRange


def resize_memory(tensor: torch.Tensor, num_bytes: int) -> None:
    """Resize a tensor's storage, without values and with all its views; 0: free it."""
    tensor.untyped_storage().resize_(num_bytes)


def has_values(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has memory for all its elements."""
    return parameter.untyped_storage().nbytes() >= parameter.nbytes


class _UnitBuffer(NamedTuple):
    """Neighbouring buckets of a buffer group that are gathered and freed together."""

    begin: int
    """Offset of the first bucket in the buffer group."""
    buckets: list[int]
    memory: torch.Tensor
    """(n,) the gathered parameters in the dtype of the message; without bytes while freed."""
    whole: torch.Tensor
    """(n,) the same storage, for parameters in their own dtype."""
    views: list[tuple[torch.nn.Parameter, torch.Tensor]]


class Zero3FlatParams(DetachedFlatParams):
    """The sharded parameters of a buffer group; parameters without a unit stay gathered.

    Whole memory is never allocated for parameters without values (`has_values`).
    """

    form = "in shards (--data-parallel-sharding parameters)"

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        super().__init__(layout, number, clock)
        self._is_described = False
        seen_as = self._buffer_group.gather_dtype or self._like.dtype
        nothing = self._like.new_full((), math.nan if self._like.is_floating_point() else 0)
        self._nothing = nothing.to(seen_as)
        self.meter: SimulatedDevice | None = None
        """Counts the memory of units, or None."""
        self._runs: dict[int, list[_UnitBuffer]] = {}
        """Runs of buckets by unit: one run for each unit, but several for unit 0, which stays gathered."""
        for unit, group in groupby(self._ranges, lambda index: self._ranges[index].unit):
            buckets = list(group)
            begin, end = self._ranges[buckets[0]].begin, self._ranges[buckets[-1]].end
            whole = self._like.new_zeros(end - begin)
            memory = (
                whole if self._buffer_group.gather_dtype is None else whole.view(torch.uint8)[: whole.numel()]
            )
            seen = memory.view(seen_as)
            views = [
                (parameter, seen[start - begin :][: parameter.numel()].view(parameter.shape))
                for parameter, start in zip(self.parameters, self._begins.values(), strict=True)
                if begin <= start < end
            ]
            run = _UnitBuffer(begin, buckets, memory, whole, views)
            if unit:
                self._resize(memory, 0)
            self._runs.setdefault(unit, []).append(run)
            if not self.is_whole:
                self._show(run, is_gathered=not unit)
        self.buffer = self._own

    def _take_over(self, numel: int) -> torch.Tensor:
        """Copy the parameters to a (numel,) buffer that they become views of; (0,) if they have no values."""
        is_new = not any(map(has_values, self.parameters))
        return self._like.new_zeros(0) if is_new else super()._take_over(numel)

    @property
    def num_bytes(self) -> int:
        """Return the bytes on the device of this rank's shards, and of parameters that stay gathered."""
        own = 0 if self._buffer_group.is_on_host else self._own.nbytes
        return own + sum(run.memory.nbytes for run in self._runs.get(0, []))

    def start_gather(self, index: int) -> CommHandle | None:
        """Gather an updated bucket that stays gathered; return None for units, gathered on demand."""
        if self._ranges[index].unit:
            return None
        with region("bucket %d all-gather", index):
            run = next(run for run in self._runs[0] if index in run.buckets)
            part = self._part(run, index, run.memory)
            return start_all_gather(part, self.shard(index), self._buffer_group.shard_group)

    def start_unit(self, unit: int, *, is_visited: bool = False) -> list[CommHandle]:
        """Start to gather a unit's parameters; return the gathers, to be waited for before reads.

        `is_visited` gathers in the dtype of the parameters, even if gathers are otherwise in fp8.
        """
        gathers: list[CommHandle] = []
        group, device = self._buffer_group.all_gather_group, self._like.device
        for run in self._runs.get(unit, []):
            memory = run.whole if is_visited else run.memory
            for index in run.buckets:
                with region("bucket %d all-gather", index):
                    own = self._sent(index, self._own_place(run, index, memory))
                    if group is not None:
                        gathers.append(start_all_gather(self._part(run, index, memory), own, group))
            if group is None:  # there is one shard
                gathers.append(queued_on(streams_of(device).current_stream()))
        return gathers

    def _sent(self, index: int, place: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a bucket, copied to its `place` if it is on the host."""
        own = self.shard(index)
        return place.copy_(own, non_blocking=True) if self._buffer_group.is_on_host else own

    def give_memory(self, unit: int) -> None:
        """Allocate memory for the parameters of a unit, without values."""
        for run in self._runs.get(unit, []):
            self._resize(run.memory, run.memory.nbytes)
            self._show(run, is_gathered=True)

    def free(self, unit: int) -> None:
        """Free the memory of a unit, whose gathers have finished."""
        for run in self._runs.get(unit, []):
            self._show(run, is_gathered=False)
            self._resize(run.memory, 0)

    def _resize(self, memory: torch.Tensor, num_bytes: int) -> None:
        if self.meter is not None:
            self.meter.reserve(num_bytes - memory.untyped_storage().nbytes())
        resize_memory(memory, num_bytes)

    def _show(self, run: _UnitBuffer, *, is_gathered: bool) -> None:
        for parameter, view in run.views:
            parameter.data = view if is_gathered else self._nothing.expand(parameter.shape)
        self._held.note(parameter for parameter, _ in run.views)

    def describe(self) -> dict[int, tuple[int, _UnitBuffer]]:
        """Make sharded parameters views of untouched host memory: only their places may be read.

        Returns:
            unit and buckets of each place, by the address of its storage.
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
    def end_placeholders(self) -> None:
        """End the description; store parameters that stay gathered, which may have been loaded."""
        self._is_described = False
        for run in self._runs.get(0, []):
            for own, place in self._own_places(run):
                own.copy_(place)
        for unit in self.units:
            self.free(unit)

    @property
    def units(self) -> list[int]:
        """Return the units that are gathered and freed."""
        return [unit for unit in self._runs if unit]

    def unit_bytes(self, unit: int) -> int:
        """Return the bytes of a gathered unit."""
        return sum(run.memory.nbytes for run in self._runs.get(unit, []))

    @torch.no_grad()
    def begin_visit(self, unit: int, *, is_writing: bool) -> None:
        """Allocate memory for a described unit; to read, gather all values; to write, fill in own shards."""
        for run in self._runs[unit]:
            self._resize(run.whole, run.whole.nbytes)
            for own, place in self._own_places(run) if is_writing else ():
                place.copy_(own)
        for gather in () if is_writing else self.start_unit(unit, is_visited=True):
            gather.wait(self._clock)

    @torch.no_grad()
    def end_visit(self, unit: int, *, is_writing: bool) -> None:
        """Free the memory of a visited unit, and keep the values written to it."""
        for run in self._runs[unit]:
            for own, place in self._own_places(run) if is_writing else ():
                own.copy_(place)
            self._resize(run.memory, 0)

    def check_whole(self) -> None:
        """Refuse parameters that are not whole with a TrainingError, unless only their places are needed."""
        if not self._is_described:
            super().check_whole()

    def own_parts(self) -> Iterator[StateRange]:
        """Yield views of this rank's parts of the parameters that do not stay gathered."""
        for index, bucket in self._ranges.items():
            for param, place in self._buffer_group.own_params(bucket) if bucket.unit else ():
                parameter, values = self._held.parameters[param.parameter], self.shard(index)[place]
                yield StateRange(parameter, param.offset, values, self._buffer_group.replica)

    def parameters_of(self, unit: int) -> list[torch.nn.Parameter]:
        """Return the parameters of a unit."""
        return [parameter for run in self._runs.get(unit, []) for parameter, _ in run.views]

    def _own_places(self, run: _UnitBuffer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in run.buckets:
            yield self.shard(index), self._own_place(run, index, run.whole)

    def _own_place(self, run: _UnitBuffer, index: int, memory: torch.Tensor) -> torch.Tensor:
        own = self._buffer_group.own(self._ranges[index])
        return memory[own.start - run.begin : own.stop - run.begin]

    @torch.no_grad()
    def leave_whole(self) -> None:
        """Keep this rank's shards of whole weights, equal on all ranks, and free the whole weights."""
        if self._whole is None:
            return
        self.store_whole()
        for run in self._runs.get(0, []):
            run.memory.copy_(self._whole[run.begin : run.begin + run.memory.numel()])
            self._show(run, is_gathered=True)
        for unit in self.units:
            self.free(unit)
        self._whole = None

    def _part(self, run: _UnitBuffer, index: int, memory: torch.Tensor) -> torch.Tensor:
        bucket_range = self._ranges[index]
        return memory[bucket_range.begin - run.begin : bucket_range.end - run.begin]


class UnitVisits:
    """Sharded parameters, described by `flats` and whole one unit at a time.

    With `is_writing`, values that visits write are kept, and must be equal on all ranks. Otherwise visits
    read, and every visit is a collective.
    """

    def __init__(self, flats: Sequence[Zero3FlatParams], device: torch.device, *, is_writing: bool) -> None:
        self._is_writing, self.device = is_writing, device
        self._places = {memory: (flat, *place) for flat in flats for memory, place in flat.describe().items()}
        self._open: tuple[Zero3FlatParams, int] | None = None

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor of a described parameter or view, valid until another unit is visited."""
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
        """End the visits."""
        if self._open is not None:
            (flat, unit), self._open = self._open, None
            flat.end_visit(unit, is_writing=self._is_writing)
