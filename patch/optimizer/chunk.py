"""Optimizer states in chunks: the unit in which they are placed, moved, updated and counted.

A range of a shard (layout.ShardRange) is registered Next-Fit: behind the one before, or in a new
chunk when it does not fit; ranges longer than a chunk are cut. All chunks have one size, in elements, so that
buffers can be exchanged instead of copied. A chunk's states travel together. Ranges whose gradients become
final late have chunks of their own, behind the others; nothing is exchanged with these, so their buffers
are as long as what they hold.

After Chunk and ChunkManager of Pai-Megatron-Patch (megatron/core/optimizer/chunk), which took them from
ColossalAI's Gemini.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch

from patch.memory import HOST, Allocator, StagedCopier

# The search tries this many multiples of a unit: 8 Mi elements, or a 64th of a small model.
_CANDIDATES, _UNIT, _UNITS_OF_SMALL = 16, 8 << 20, 64


class ChunkFullError(Exception):
    """A tensor does not fit behind those that a chunk holds."""


class Chunk:
    """A flat buffer of one state.

    Args:
        size: elements. memory: where it lies at first.
    """

    def __init__(self, size: int, memory: Allocator, dtype: torch.dtype = torch.float32) -> None:
        self.size, self.memory = size, memory
        self.used = 0
        self.data = memory.allocate(size, dtype)

    def alloc_tensor(self, numel: int) -> torch.Tensor:
        """The next `numel` elements; zeros. A view until the chunk moves.

        Raises:
            ChunkFullError: fewer are left.
        """
        if self.used + numel > self.size:
            raise ChunkFullError(f"{numel} elements do not fit behind {self.used} in a chunk of {self.size}")
        self.used += numel
        return self.data[self.used - numel : self.used]

    def append_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor behind those that are there; its view, flat.

        Raises:
            ChunkFullError: it does not fit.
        """
        return self.alloc_tensor(tensor.numel()).copy_(tensor.detach().reshape(-1))

    def clone(self, memory: Allocator) -> Chunk:
        """A chunk of the same layout, all zeros."""
        twin = Chunk(self.size, memory, self.data.dtype)
        twin.used = self.used
        return twin


class Segment(NamedTuple):
    """Elements of one shard in a chunk."""

    shard: int
    begin: int
    """First element in the shard."""
    end: int
    is_decayed: bool
    offset: int
    """First element in the chunk."""

    @property
    def place(self) -> slice:
        """Its elements in the chunk's buffers."""
        return slice(self.offset, self.offset + self.end - self.begin)


class StateChunk:
    """The states of up to `size` elements; without buffers until `allocate`."""

    def __init__(self, size: int, is_late: bool) -> None:
        self.size, self.is_late = size, is_late
        self.index = 0
        """In the order of backward: the gradients of chunk 0 come first, its weights are needed last."""
        self.segments: list[Segment] = []
        self.is_on_host = False
        self.states: dict[str, Chunk] = {}
        self._arriving: Future[None] | None = None

    @property
    def numel(self) -> int:
        """Elements in use."""
        return self.segments[-1].place.stop if self.segments else 0

    @property
    def num_bytes(self) -> int:
        """Of its buffers, what is not in use included."""
        return sum(chunk.data.nbytes for chunk in self.states.values())

    def views(self, name: str, shard: int, begin: int, end: int) -> Iterator[tuple[int, torch.Tensor]]:
        """A state of elements [begin, end) of a shard: views, each with its first element in the shard."""
        self.settle()
        for segment in self.segments:
            first, last = max(begin, segment.begin), min(end, segment.end)
            if segment.shard == shard and first < last:
                offset = segment.offset + first - segment.begin
                yield first, self.states[name].data[offset : offset + last - first]

    def allocate(self, dtypes: Mapping[str, torch.dtype], memory: Allocator) -> None:
        """Make a buffer of zeros for each state."""
        size = self.numel if self.is_late else self.size
        self.states = {name: Chunk(size, memory, dtype) for name, dtype in dtypes.items()}
        for chunk in self.states.values():
            chunk.alloc_tensor(self.numel)

    def reset_device(self, memory: Allocator, transfer: StagedCopier, *, is_host: bool) -> None:
        """Move all states; views of them go stale.

        What goes to the host has left the device when this returns: its memory is wanted there. What goes
        to the device may still be on its way, see `settle`.

        Raises:
            OutOfMemoryError: the device has no room; all states are where they were.
        """
        self.settle()
        twins: dict[str, Chunk] = {}
        try:
            for name, chunk in self.states.items():
                twins[name] = chunk.clone(memory)
        except torch.OutOfMemoryError:
            for twin in twins.values():
                memory.free(twin.data)
            raise
        copies = [(chunk.data, twins[name].data) for name, chunk in self.states.items()]
        if is_host:
            transfer.copy_to_host(copies)
        else:
            self._arriving = transfer.copy_to_device(copies)
        for chunk in self.states.values():
            chunk.memory.free(chunk.data)
        self.states, self.is_on_host = twins, is_host

    def settle(self) -> None:
        """Wait until all states are where they were moved to; call before they are used."""
        if self._arriving is not None:
            self._arriving.result()
            self._arriving = None


class ChunkManager:
    """All chunks of a rank.

    Args:
        size: elements of a chunk.
        device: the memory of chunks that are not on the host.
        transfer: carries what moves between them; None where nothing does.
    """

    def __init__(self, size: int, device: Allocator, transfer: StagedCopier | None = None) -> None:
        self.size, self._device, self._transfer = size, device, transfer
        self.chunks: list[StateChunk] = []
        self._open: dict[bool, StateChunk] = {}

    def register(self, shard: int, begin: int, end: int, *, is_decayed: bool, is_late: bool) -> None:
        """Give elements [begin, end) of a shard their places, Next-Fit; before `allocate`.

        Args:
            is_late: the gradient is not final when the shard's reduction is.
        """
        while begin < end:
            chunk = self._open.get(is_late)
            if chunk is None or chunk.numel + min(end - begin, self.size) > self.size:
                chunk = self._open[is_late] = StateChunk(self.size, is_late)
                self.chunks.append(chunk)
            stop = min(end, begin + self.size - chunk.numel)
            chunk.segments.append(Segment(shard, begin, stop, is_decayed, chunk.numel))
            begin = stop

    def close(self) -> None:
        """Number the chunks, after the last `register`: late ones follow the others."""
        self.chunks.sort(key=lambda chunk: chunk.is_late)
        for index, chunk in enumerate(self.chunks):
            chunk.index = index

    def allocate(self, dtypes: Mapping[str, torch.dtype]) -> None:
        """Make every chunk's buffers, one for each state, where the chunk is to lie."""
        for chunk in self.chunks:
            chunk.allocate(dtypes, HOST if chunk.is_on_host else self._device)

    def move(self, chunk: StateChunk, *, to_host: bool) -> None:
        """Move a chunk of which no update is under way.

        Raises:
            OutOfMemoryError: the device has no room; nothing moved.
        """
        if to_host != chunk.is_on_host:
            assert self._transfer is not None, "nothing moves here"
            chunk.reset_device(HOST if to_host else self._device, self._transfer, is_host=to_host)

    @property
    def num_elements(self) -> int:
        """Elements of all chunks that are in use."""
        return sum(chunk.numel for chunk in self.chunks)

    @property
    def offload_fraction(self) -> float:
        """The share of these elements whose states are on the host."""
        on_host = sum(chunk.numel for chunk in self.chunks if chunk.is_on_host)
        return on_host / max(1, self.num_elements)

    def total_bytes(self, *, on_host: bool) -> int:
        """Bytes of states on the host, or on the device."""
        return sum(chunk.num_bytes for chunk in self.chunks if chunk.is_on_host == on_host)


def find_best_chunk_size(numels: Sequence[int]) -> int:
    """The chunk size, in elements, that leaves the fewest elements of chunks unused.

    Of equally good ones the smallest is taken: the offloaded fraction is then exacter.

    Args:
        numels: lengths of the ranges, in the order of registration.
    """
    unit = min(_UNIT, max(1, -(-sum(numels) // _UNITS_OF_SMALL)))
    return min(
        (unit * factor for factor in range(1, _CANDIDATES + 1)), key=lambda size: _unused(numels, size)
    )


def _unused(numels: Sequence[int], size: int) -> int:
    manager = ChunkManager(size, HOST)
    for numel in numels:
        manager.register(0, 0, numel, is_decayed=False, is_late=False)
    return sum(size - chunk.numel for chunk in manager.chunks)
