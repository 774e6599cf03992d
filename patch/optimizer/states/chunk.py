"""Optimizer states in chunks: the unit in which they are placed, moved, updated and counted.

Ranges of elements of bucket shards are registered Next-Fit: after the previous range, or in a new chunk if
they do not fit; ranges longer than a chunk are split. All chunks have one size, in elements, so that buffers
can be exchanged instead of copied. The states of a chunk move together. Ranges whose gradients need an extra
reduction are in separate chunks, after the others. Those chunks are never exchanged, so their buffers are
only as long as their ranges.

Source: Chunk and ChunkManager of Pai-Megatron-Patch (megatron/core/optimizer/chunk), which took them from
ColossalAI's Gemini.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from patch.layout.buckets import CHUNK_UNITS, chunk_unit
from patch.memory.disk import write_values
from patch.memory.offload_device import HOST, Allocator
from patch.memory.simulated_device import UNLIMITED
from patch.memory.staged_copy import StagedCopier
from patch.optimizer.kernels.low_bit_moments import RngCoords, elements_of


class ShardRange(NamedTuple):
    """Neighbouring elements [begin, end) of a shard with the same treatment, counted in the shard."""

    begin: int
    end: int
    group: int
    needs_extra_reduction: bool
    """Whether the gradient has another reduction after that of its bucket (over tensor-parallel ranks, or
    over the two stages of a tied embedding; orthogonalization), so that it is final later."""
    draw: RngCoords | None = None
    """The coordinates of the random numbers for bf16 moments, or None."""


class BucketShard(NamedTuple):
    """This rank's part of one bucket."""

    grad: torch.Tensor
    """(n,) the reduced gradient."""
    param: torch.Tensor
    ranges: list[ShardRange]
    """Its elements without padding."""
    is_on_host: bool = False
    """Whether the parameters are in host memory, so that the host updates them."""


class ChunkFullError(Exception):
    """A tensor does not fit into the unused part of a chunk."""


class Chunk:
    """A flat buffer of `size` elements of one state."""

    def __init__(self, size: int, memory: Allocator, dtype: torch.dtype = torch.float32) -> None:
        self.size, self.memory = size, memory
        self.used = 0
        self.data = memory.allocate(size, dtype)

    def alloc_tensor(self, numel: int) -> torch.Tensor:
        """Return a view of the next `numel` unused elements, zeros, valid until a move, or raise
        ChunkFullError."""
        if self.used + numel > self.size:
            raise ChunkFullError(f"{numel} elements do not fit behind {self.used} in a chunk of {self.size}")
        self.used += numel
        return self.data[self.used - numel : self.used]

    def append_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor into the next unused elements, and return a flat view, or raise ChunkFullError."""
        return self.alloc_tensor(tensor.numel()).copy_(tensor.detach().reshape(-1))

    def clone(self, memory: Allocator) -> Chunk:
        """Allocate a chunk of zeros with the same layout in `memory`."""
        twin = Chunk(self.size, memory, self.data.dtype)
        twin.used = self.used
        return twin


class ChunkRange(NamedTuple):
    """Neighbouring elements of one bucket shard whose states are in one chunk."""

    shard: int
    begin: int
    end: int
    group: int
    offset: int
    """First element, counted in the chunk."""
    draw: RngCoords | None = None
    """The coordinates of the random numbers for bf16 moments, or None."""

    @property
    def in_shard(self) -> slice:
        """Return the elements, counted in the shard."""
        return slice(self.begin, self.end)

    @property
    def in_chunk(self) -> slice:
        """Return the elements, counted in the chunk's buffers."""
        return slice(self.offset, self.offset + self.end - self.begin)


class StateChunk:
    """The states of up to `size` elements, one `Chunk` for each state; without buffers until `allocate`."""

    def __init__(self, size: int, needs_extra_reduction: bool, dtypes: Mapping[str, torch.dtype]) -> None:
        self.size, self.needs_extra_reduction, self.dtypes = size, needs_extra_reduction, dtypes
        self.index = 0
        """Order of backward: chunk 0 has the first gradients, and its parameters are needed last."""
        self.ranges: list[ChunkRange] = []
        self.is_on_host = self.stays_on_host = False
        """Whether the states are not on the device but in host memory or on disk; whether they never move to
        the device, because their parameters are in host memory."""
        self.is_streamed = False
        """Whether the device updates the states while they are in host memory (streamed_update.py)."""
        self.states: dict[str, Chunk] = {}
        self.wait_for_copies: Callable[[], object] | None = None
        """Blocks until the last copies of the states have ended; None if there are none."""

    @property
    def numel(self) -> int:
        """Return the number of elements in use."""
        return self.ranges[-1].in_chunk.stop if self.ranges else 0

    @property
    def is_on_disk(self) -> bool:
        """Return whether the states are on a disk: their buffers have no values (patch/memory/disk.py)."""
        return any(chunk.data.is_meta for chunk in self.states.values())

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all states, including unused space."""
        return sum(self._size_of(name) * dtype.itemsize for name, dtype in self.dtypes.items())

    def _size_of(self, name: str) -> int:
        return (self.numel if self.needs_extra_reduction else self.size) // elements_of(name)

    def views(self, name: str, shard: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield views of a state of elements [begin, end) of a shard, as (first element in the shard, view).

        A view of scales has one number for several elements (`elements_of`). Nothing is yielded if parameters
        of this dtype have no such state.
        """
        self.wait_for_transfer()
        if name not in self.states:
            return
        for range_ in self.ranges:
            first, last = max(begin, range_.begin), min(end, range_.end)
            if range_.shard == shard and first < last:
                offset, each = range_.offset + first - range_.begin, elements_of(name)
                yield first, self.states[name].data[offset // each : (offset + last - first) // each]

    def allocate(self, memory: Allocator) -> None:
        """Allocate a buffer of zeros in `memory` for each state."""
        for name, dtype in self.dtypes.items():
            self.states[name] = Chunk(self._size_of(name), memory, dtype)
            self.states[name].alloc_tensor(self.numel // elements_of(name))

    def reset_device(self, memory: Allocator, copier: StagedCopier, *, is_host: bool) -> None:
        """Move all states to other memory (`is_host`: host or disk memory); views of them become invalid.

        A move to the host is complete on return, because its purpose is to free device memory. A move to the
        device may still run, see `wait_for_transfer`.

        Raises:
            OutOfMemoryError: the device has too little free memory; no state was moved.
            TrainingError: the disk is full or fails.
        """
        self.wait_for_transfer()
        twins: dict[str, Chunk] = {}
        try:
            for name, chunk in self.states.items():
                twins[name] = chunk.clone(memory)
        except torch.OutOfMemoryError:
            for twin in twins.values():
                memory.free(twin.data)
            raise
        copies = [(chunk.data, twins[name].data) for name, chunk in self.states.items()]
        if is_host and self.is_on_host:
            for source, target in copies:
                write_values(target, source)
        elif is_host:
            copier.copy_to_host(copies)
        else:
            self.wait_for_copies = copier.copy_to_device(copies).result
        for chunk in self.states.values():
            chunk.memory.free(chunk.data)
        self.states, self.is_on_host = twins, is_host

    def wait_for_transfer(self) -> None:
        """Wait until the last move is complete; call it before the states are used."""
        if self.wait_for_copies is not None:
            self.wait_for_copies()
            self.wait_for_copies = None


class ChunkManager:
    """Packs the states of a rank's bucket shards into chunks of equal size.

    It allocates chunks on the device, host or disk, and moves whole chunks. A policy (placement.py) chooses
    their places, and HybridAdam updates them.

    Args:
        size: elements of a chunk.
        device: the memory of chunks that are not on the host.
        copier: copies chunks that move, or None if chunks never move.
        disk: memory of chunks on the host that do not fit into `host_bytes`, or None if all fit.
        pinned: memory of streamed chunks on the host.
    """

    def __init__(
        self,
        size: int,
        device: Allocator,
        copier: StagedCopier | None = None,
        disk: Allocator | None = None,
        host_bytes: int = UNLIMITED,
        pinned: Allocator = HOST,
    ) -> None:
        self.size, self._device, self._copier, self._pinned = size, device, copier, pinned
        self._disk, self._host_bytes = disk, host_bytes
        self.chunks: list[StateChunk] = []
        self._open: dict[tuple[object, ...], StateChunk] = {}

    def register(self, shard: int, elements: ShardRange, dtypes: Mapping[str, torch.dtype]) -> None:
        """Assign a range of a bucket shard to chunks, Next-Fit; call it before `allocate`.

        Args:
            elements: the range. Ranges whose gradients need an extra reduction go to separate chunks.
            dtypes: names and dtypes of its states, the same in a whole chunk.
        """
        begin, end, group, needs_extra_reduction, draw = elements
        kind = needs_extra_reduction, *dtypes.items()
        while begin < end:
            chunk = self._open.get(kind)
            if chunk is None or chunk.numel + min(end - begin, self.size) > self.size:
                chunk = self._open[kind] = StateChunk(self.size, needs_extra_reduction, dtypes)
                self.chunks.append(chunk)
            stop = min(end, begin + self.size - chunk.numel)
            here = draw and draw._replace(skip=draw.skip + begin - elements.begin)
            chunk.ranges.append(ChunkRange(shard, begin, stop, group, chunk.numel, here))
            begin = stop

    def finish_registration(self) -> None:
        """Number the chunks; those whose gradients need an extra reduction follow the others."""
        self.chunks.sort(key=lambda chunk: chunk.needs_extra_reduction)
        for index, chunk in enumerate(self.chunks):
            chunk.index = index
            if self._copier is None:  # never exchanged
                chunk.size = chunk.numel

    def allocate(self) -> None:
        """Allocate the buffers of every chunk on the host or the device."""
        memories = dict(self._host_memories())
        for chunk in self.chunks:
            chunk.allocate(memories.get(chunk, self._device))

    def _host_memories(self) -> list[tuple[StateChunk, Allocator]]:
        """Return the memory of each chunk on the host: the first chunks, needed last, are on the disk."""
        left, found = self._host_bytes, []
        for chunk in reversed([chunk for chunk in self.chunks if chunk.is_on_host]):
            left -= chunk.num_bytes
            memory = self._host_memory(chunk)
            found.append((chunk, memory if self._disk is None or left >= 0 else self._disk))
        return found[::-1]

    def _host_memory(self, chunk: StateChunk) -> Allocator:
        return self._pinned if chunk.is_streamed else HOST

    def move(self, chunk: StateChunk, *, to_host: bool, is_streamed: bool | None = None) -> None:
        """Move a chunk that is not being updated to the host or to the device.

        Args:
            is_streamed: for a chunk that stays in host memory: whether the device updates it from now on.
        Raises:
            OutOfMemoryError: the device has too little free memory; nothing was moved.
            MemoryError: the system cannot pin enough memory for a streamed chunk; nothing was moved.
            TrainingError: the disk is full or fails.
        """
        if is_streamed is not None and self._copier is not None:
            chunk.reset_device(self._pinned if is_streamed else HOST, self._copier, is_host=True)
            chunk.is_streamed = is_streamed
        if to_host != chunk.is_on_host:
            assert self._copier is not None, "these chunks never move"
            try:
                if chunk.is_on_disk:
                    chunk.reset_device(HOST, self._copier, is_host=True)
                memory = self._host_memory(chunk) if to_host else self._device
                chunk.reset_device(memory, self._copier, is_host=to_host)
            finally:
                self._settle(self._copier)

    def _settle(self, copier: StagedCopier) -> None:
        for chunk, memory in self._host_memories() if self._disk is not None else ():
            if chunk.is_on_disk != (memory is self._disk):
                chunk.reset_device(memory, copier, is_host=True)

    @property
    def num_elements(self) -> int:
        """Return the number of elements in use, over all chunks."""
        return sum(chunk.numel for chunk in self.chunks)

    @property
    def offload_fraction(self) -> float:
        """Return the share of elements whose states are on the host."""
        on_host = sum(chunk.numel for chunk in self.chunks if chunk.is_on_host)
        return on_host / max(1, self.num_elements)

    def total_bytes(self, *, on_host: bool) -> int:
        """Return the bytes of states on the host, disk included, or on the device."""
        return sum(chunk.num_bytes for chunk in self.chunks if chunk.is_on_host == on_host)

    @property
    def disk_bytes(self) -> int:
        """Return the bytes of states on the disk."""
        return sum(chunk.num_bytes for chunk in self.chunks if chunk.is_on_disk)


def find_best_chunk_size(numels: Sequence[int]) -> int:
    """Return the chunk size, in elements, with the fewest unused elements in chunks.

    On a tie the smallest size wins: small chunks make the offloaded fraction more exact.
    """
    unit = chunk_unit(sum(numels))
    return min((unit * factor for factor in CHUNK_UNITS), key=lambda size: _unused(numels, size))


def _unused(numels: Sequence[int], size: int) -> int:
    manager = ChunkManager(size, HOST)
    for numel in numels:
        manager.register(0, ShardRange(0, numel, group=0, needs_extra_reduction=False), {})
    return sum(size - chunk.numel for chunk in manager.chunks)
