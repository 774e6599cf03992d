"""Where chunks of optimizer states live: host or device, decided between steps by each rank for itself.

`static` keeps the user's fraction on the host. `auto` begins with everything there, watches how much memory
the rest of a run takes at its peaks, and gives what stays free to chunks. Both send low indices to the host
first: their gradients come first in backward and their weights are needed last in forward, so the host has
the most time for them. Pure logic: equal calls give equal moves, and nothing here allocates.

The idea of `auto` (track the largest non-model memory, keep it free, fill the rest) is that of PatrickStar
(arXiv:2108.05818) and ColossalAI's Gemini; what keeps chunks from going to and fro is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from patch.storage.sizes import size_text

WINDOW = 64
"""Peaks of each kind that are remembered; and steps that memory must stay free once auto had to evict."""
WARM_UP = 2
"""Steps before the first chunk goes to the device: a process's first steps still grow."""
_LONGEST_PATIENCE = 4096


class Placed(Protocol):
    """What placement knows of a chunk."""

    @property
    def index(self) -> int:
        """Place in the order of backward."""

    @property
    def numel(self) -> int:
        """Elements of each state."""

    @property
    def num_bytes(self) -> int:
        """Of all its states, as held."""

    @property
    def is_on_host(self) -> bool:
        """Whether its states are in host memory."""


class Move(NamedTuple):
    """One chunk that is to change its place."""

    chunk: Placed
    to_host: bool
    reason: str


class Memory(NamedTuple):
    """A device's memory in bytes, as it is between two steps."""

    usable: int
    """What this process may hold in all: what it has, and what nobody has."""
    fixed: int
    """Of that, model data that never moves: weights and gradients."""


class MemStatsCollector:
    """The peaks of what is no model data: activations, workspaces, messages.

    Each kind has a window of its own, because evaluations and checkpoints are rare: their peaks would be
    forgotten between two of them. A peak leaves with its window, so no early one holds memory for ever.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, deque[int]] = {}

    def record(self, kind: str, peak_bytes: int, model_bytes: int) -> None:
        """Note one train step, evaluation or save.

        Args:
            kind: "train", "evaluate" or "save". peak_bytes: the most that was allocated meanwhile.
            model_bytes: of that, weights, gradients and chunks.
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
    """The user's fraction of this rank's state elements on the host, exact to one chunk; decided once.

    Args:
        fraction: 0 to 1.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._is_decided = False

    def moves(self, chunks: Sequence[Placed], memory: Memory) -> list[Move]:
        """What makes the fraction true, the first time; nothing afterwards.

        Args:
            chunks: all of this rank, in the order of their indices.
        """
        if self._is_decided:
            return []
        self._is_decided = True
        num_host = self._num_host(chunks)
        reason = f"fraction {self._fraction:g}"
        wanted = [Move(chunk, place < num_host, reason) for place, chunk in enumerate(chunks)]
        return sorted(
            (move for move in wanted if move.to_host != move.chunk.is_on_host),
            key=lambda move: (not move.to_host, move.chunk.index),
        )

    def evict(self, chunks: Sequence[Placed], num_bytes: int) -> list[Move]:
        """Moves that free memory on the device; as `AutoPlacementPolicy.evict`."""
        return _evictions(chunks, num_bytes, "out of memory")

    def _num_host(self, chunks: Sequence[Placed]) -> int:
        """How many of the first chunks are nearest to the fraction; the fewer where two are as near."""
        wanted = self._fraction * sum(chunk.numel for chunk in chunks)
        held = accumulate((chunk.numel for chunk in chunks), initial=0)
        missed = [abs(wanted - numel) for numel in held]
        return missed.index(min(missed))


class AutoPlacementPolicy:
    """Fills what the rest of the run leaves free on the device, and gives way at once when it is short.

    A promotion waits until nothing grew and enough was free for `WARM_UP` steps in a row, and takes no more
    than was free in all of them. Every time chunks had to leave, that patience grows: to WINDOW steps, then
    twice as many each time, so that the number of moves grows with the logarithm of the run.

    Args:
        threshold: bytes of the device that are kept free beside the largest peak.
    """

    def __init__(self, threshold: int) -> None:
        self.stats = MemStatsCollector()
        self._threshold = threshold
        self._patience = WARM_UP
        self._free: deque[int] = deque(maxlen=self._patience)
        """Of the last steps in which nothing moved or grew."""
        self._largest_peak = -1

    def moves(self, chunks: Sequence[Placed], memory: Memory) -> list[Move]:
        """Evictions when memory is short, promotions when it has been free for long enough.

        Args:
            chunks: all of this rank, in the order of their indices. memory: now, before the next step.
        """
        peak = self.stats.max_non_model
        if peak is None:
            return []
        on_device = sum(chunk.num_bytes for chunk in chunks if not chunk.is_on_host)
        free = memory.usable - memory.fixed - on_device - peak - self._threshold
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

    def evict(self, chunks: Sequence[Placed], num_bytes: int) -> list[Move]:
        """Moves that free at least `num_bytes` on the device, or all that chunks hold there if it is less."""
        return self._evict(chunks, num_bytes, "out of memory")

    def _evict(self, chunks: Sequence[Placed], num_bytes: int, reason: str) -> list[Move]:
        found = _evictions(chunks, num_bytes, reason)
        if found:
            self.back_off()
        self._free.clear()
        return found

    def back_off(self) -> None:
        """Wait longer before the next promotion; call it when the device had no room for one after all."""
        self._patience = min(max(WINDOW, 2 * self._patience), _LONGEST_PATIENCE)
        self._free = deque(maxlen=self._patience)


def _evictions(chunks: Sequence[Placed], num_bytes: int, reason: str) -> list[Move]:
    found, freed = [], 0
    for chunk in chunks:
        if freed >= num_bytes:
            break
        if not chunk.is_on_host:
            found.append(Move(chunk, True, reason))
            freed += chunk.num_bytes
    return found


def _promotions(chunks: Sequence[Placed], free: int, reason: str) -> list[Move]:
    """Chunks for the device, those first for which the host has the least time; in order, none left out."""
    found = []
    for chunk in reversed(chunks):
        if chunk.is_on_host:
            free -= chunk.num_bytes
            if free < 0:
                break
            found.append(Move(chunk, False, reason))
    return found
