"""Where chunks of optimizer states live, on host or device; each rank decides between two steps for itself.

`static` keeps the user's fraction on the host. `auto` begins with all chunks there, watches how much memory
the rest of a run takes at its peaks, and moves chunks to what stays free on the device. Both put low indices
on the host first: their gradients come first in backward and their parameters are needed last in forward, so
the host has the most time for them. This is pure logic: equal calls give equal moves, and nothing here
allocates.

Source: the idea of `auto` (track the largest non-model memory, keep it free, fill the rest) is that of
PatrickStar (arXiv:2108.05818) and ColossalAI's Gemini; what keeps chunks from moving back and forth is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from patch.storage.sizes import size_text

WINDOW = 64
"""Peaks of each kind that are remembered; also the steps that memory must stay free after an eviction."""
WARM_UP = 2
"""Steps before the first chunk moves to the device, because memory still grows in a process's first steps."""
_LONGEST_PATIENCE = 4096


class ChunkInfo(Protocol):
    """What placement knows of a chunk."""

    @property
    def index(self) -> int:
        """Index in the order of backward."""

    @property
    def numel(self) -> int:
        """Elements of each state."""

    @property
    def num_bytes(self) -> int:
        """Bytes allocated for all states of the chunk."""

    @property
    def is_on_host(self) -> bool:
        """Whether its states are in host memory."""


class Move(NamedTuple):
    """One chunk that is to move to the host or to the device."""

    chunk: ChunkInfo
    to_host: bool
    reason: str


class DeviceMemory(NamedTuple):
    """A device's memory between two steps."""

    usable_bytes: int
    """Bytes that this process may hold in all: those it holds already and those that are free."""
    fixed_bytes: int
    """Bytes of these that never move: parameters and gradients."""


class MemStatsCollector:
    """Peaks of non-model memory: activations, workspaces, communication buffers.

    Each kind of work has a window of its own, because evaluations and checkpoints are rare: in one window
    their peaks would be forgotten before the next one. A peak is forgotten after WINDOW more of its kind.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, deque[int]] = {}

    def record(self, kind: str, peak_bytes: int, model_bytes: int) -> None:
        """Record one train step, evaluation or save.

        Args:
            kind: "train", "evaluate" or "save".
            peak_bytes: the most that was allocated meanwhile.
            model_bytes: of that, parameters, gradients and chunks.
        """
        peaks = self._peaks.setdefault(kind, deque(maxlen=WINDOW))
        peaks.append(max(0, peak_bytes - model_bytes))

    @property
    def max_non_model(self) -> int | None:
        """The largest peak in bytes; None before the first train step."""
        if "train" not in self._peaks:
            return None
        return max(max(peaks) for peaks in self._peaks.values())


class StaticPlacementPolicy:
    """Keeps the user's fraction of this rank's states on the host, exact to one chunk; decides once.

    Args:
        fraction: 0 to 1.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._is_decided = False

    def moves(self, chunks: Sequence[ChunkInfo], memory: DeviceMemory) -> list[Move]:
        """The moves that reach the fraction at the first call; none afterwards.

        Args:
            chunks: all chunks of this rank, in the order of their indices.
            memory: not used.
        """
        if self._is_decided:
            return []
        self._is_decided = True
        num_host = self._num_host(chunks)
        reason = f"fraction {self._fraction:g}"
        wanted = [Move(chunk, position < num_host, reason) for position, chunk in enumerate(chunks)]
        return sorted(
            (move for move in wanted if move.to_host != move.chunk.is_on_host),
            key=lambda move: (not move.to_host, move.chunk.index),
        )

    def evict(self, chunks: Sequence[ChunkInfo], num_bytes: int) -> list[Move]:
        """Moves that free memory on the device; as `AutoPlacementPolicy.evict`."""
        return _evictions(chunks, num_bytes, "out of memory")

    def _num_host(self, chunks: Sequence[ChunkInfo]) -> int:
        """The number of first chunks that comes nearest to the fraction; the smaller of two equally near."""
        wanted = self._fraction * sum(chunk.numel for chunk in chunks)
        held = accumulate((chunk.numel for chunk in chunks), initial=0)
        missed = [abs(wanted - numel) for numel in held]
        return missed.index(min(missed))


class AutoPlacementPolicy:
    """Fills what the rest of the run leaves free on the device, and evicts at once when memory is short.

    Chunks are promoted to the device after `WARM_UP` steps in a row in which no peak grew, and take no more
    than was free in all of these steps. After each eviction the policy waits longer: WINDOW steps, then
    twice as many each time, so that the number of moves grows with the logarithm of the run.

    Args:
        threshold: bytes of the device that are kept free beside the largest peak.
    """

    def __init__(self, threshold: int) -> None:
        self.stats = MemStatsCollector()
        self._threshold = threshold
        self._patience = WARM_UP
        self._free: deque[int] = deque(maxlen=self._patience)
        """Bytes free in each of the last steps since something moved or a peak grew."""
        self._largest_peak = -1

    def moves(self, chunks: Sequence[ChunkInfo], memory: DeviceMemory) -> list[Move]:
        """Evictions when memory is short, promotions when it has been free for long enough.

        Args:
            chunks: all chunks of this rank, in the order of their indices.
            memory: the device's memory now, before the next step.
        """
        peak = self.stats.max_non_model
        if peak is None:
            return []
        on_device = sum(chunk.num_bytes for chunk in chunks if not chunk.is_on_host)
        free = memory.usable_bytes - memory.fixed_bytes - on_device - peak - self._threshold
        if free < 0:
            reason = f"{size_text(-free)} short of the largest peak, {size_text(peak)}"
            return self._evict(chunks, -free, reason)
        if peak > self._largest_peak:
            self._free.clear()
        self._largest_peak = peak
        self._free.append(free)
        if len(self._free) < self._patience:
            return []
        lasting = min(self._free)
        found = _promotions(chunks, lasting, f"{size_text(lasting)} free beside {size_text(peak)}")
        if found:
            self._free.clear()
        return found

    def evict(self, chunks: Sequence[ChunkInfo], num_bytes: int) -> list[Move]:
        """Moves that free at least `num_bytes` on the device, or all that chunks hold there if it is less."""
        return self._evict(chunks, num_bytes, "out of memory")

    def _evict(self, chunks: Sequence[ChunkInfo], num_bytes: int, reason: str) -> list[Move]:
        found = _evictions(chunks, num_bytes, reason)
        if found:
            self.back_off()
        self._free.clear()
        return found

    def back_off(self) -> None:
        """Wait longer before the next promotion; call it when the device had no room for a promotion."""
        self._patience = min(max(WINDOW, 2 * self._patience), _LONGEST_PATIENCE)
        self._free = deque(maxlen=self._patience)


def _evictions(chunks: Sequence[ChunkInfo], num_bytes: int, reason: str) -> list[Move]:
    found, freed = [], 0
    for chunk in chunks:
        if freed >= num_bytes:
            break
        if not chunk.is_on_host:
            found.append(Move(chunk, True, reason))
            freed += chunk.num_bytes
    return found


def _promotions(chunks: Sequence[ChunkInfo], free: int, reason: str) -> list[Move]:
    """Moves to the device in the order of indices from the last, as far as `free` bytes go."""
    found = []
    for chunk in reversed(chunks):
        if chunk.is_on_host:
            free -= chunk.num_bytes
            if free < 0:
                break
            found.append(Move(chunk, False, reason))
    return found
