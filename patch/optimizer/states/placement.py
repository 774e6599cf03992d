"""Policies that decide which chunks of optimizer states are on the host and which on the device.

Each rank decides for itself between two steps. `static` keeps the user's fraction on the host. `auto` starts
with all chunks on the host. It tracks the peak memory of the rest of the run, and moves chunks to the device
as long as memory stays free. Both put low indices on the host first: their gradients come first in backward
and their parameters are needed last in forward, so the host has the most time for them. Policies are pure
logic: equal calls return equal moves, and nothing here allocates.

Source: the idea of `auto` (track the largest non-model memory, keep it free, fill the rest) is that of
PatrickStar (arXiv:2108.05818) and ColossalAI's Gemini. The rule against moving chunks back and forth is new.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from patch.layout.buckets import NUM_STREAMED
from patch.optimizer.states.chunk import StateChunk
from patch.text import size_text

WINDOW = 64
"""Number of peaks of each kind that are kept; also the steps that memory must stay free after an eviction."""
WARM_UP = 2
"""Steps before the first chunk moves to the device, because memory still grows in a process's first steps."""
_MAX_PATIENCE = 4096
_OUT_OF_MEMORY = "out of memory"


class Move(NamedTuple):
    """A move of one chunk, to the host or to the device, or of its updates."""

    chunk: StateChunk
    to_host: bool
    reason: str
    is_streamed: bool | None = None
    """For a chunk that stays on the host: whether the device updates it from now on."""


class LateUpdates(NamedTuple):
    """The host's or the device's updates of a step that began when the gradient norm was known."""

    seconds: float = 0.0
    """Time from the norm to the last end of these updates and of their copies."""
    numel: int = 0


class DeviceMemory(NamedTuple):
    """A device's memory between two steps."""

    usable_bytes: int
    """Bytes that this process may use: bytes in use plus free bytes."""
    fixed_bytes: int
    """The part of these bytes that never moves: parameters and gradients."""


class MemStatsCollector:
    """Peaks of non-model memory: activations, workspaces, communication buffers.

    Each kind of work has a separate window of WINDOW peaks. In a common window the peaks of rare evaluations
    and checkpoints would be dropped before the next evaluation or checkpoint.
    """

    def __init__(self) -> None:
        self._peaks: dict[str, deque[int]] = {}

    def record(self, kind: str, peak_bytes: int, model_bytes: int) -> None:
        """Record the peak of one "train" step, "evaluate" or "save" (`kind`).

        Args:
            peak_bytes: peak allocated bytes during it.
            model_bytes: the part of these bytes that are parameters, gradients and chunks.
        """
        peaks = self._peaks.setdefault(kind, deque(maxlen=WINDOW))
        peaks.append(max(0, peak_bytes - model_bytes))

    @property
    def max_non_model(self) -> int | None:
        """Return the largest peak in bytes, or None before the first train step."""
        if "train" not in self._peaks:
            return None
        return max(max(peaks) for peaks in self._peaks.values())


class StaticPlacementPolicy:
    """Keeps a `fraction` (0 to 1) of this rank's elements on the host, exact to one chunk; decides once."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction
        self._is_decided = False

    def moves(self, chunks: Sequence[StateChunk], memory: DeviceMemory) -> list[Move]:
        """Return the moves that reach the fraction at the first call, then none."""
        if self._is_decided:
            return []
        self._is_decided = True
        on_host = [*accumulate((chunk.numel for chunk in chunks), initial=0)]
        errors = [abs(self._fraction * on_host[-1] - numel) for numel in on_host]
        num_host = errors.index(min(errors))  # the smaller number on a tie
        reason = f"fraction {self._fraction:g}"
        wanted = [Move(chunk, position < num_host, reason) for position, chunk in enumerate(chunks)]
        return sorted(
            (move for move in wanted if move.to_host != move.chunk.is_on_host),
            key=lambda move: (not move.to_host, move.chunk.index),
        )

    def evict(self, chunks: Sequence[StateChunk], num_bytes: int) -> list[Move]:
        """Return moves that free memory on the device; see `AutoPlacementPolicy.evict`."""
        return _evictions(chunks, num_bytes, _OUT_OF_MEMORY)


class AutoPlacementPolicy:
    """Fills the device memory that the rest of the run leaves free, and evicts at once when memory is short.

    Chunks are promoted to the device after `WARM_UP` steps in a row in which no peak grew, and take only
    memory that was free in all of these steps. After each eviction the policy waits longer: WINDOW steps,
    then twice as long each time. So the number of moves grows with the logarithm of the run's length.

    Args:
        threshold: device bytes that are kept free in addition to the largest peak.
    """

    def __init__(self, threshold: int) -> None:
        self.stats = MemStatsCollector()
        self._threshold = threshold
        self._patience = WARM_UP
        self._free: deque[int] = deque(maxlen=self._patience)
        """Free bytes in each of the last steps, since a chunk moved or a peak grew."""
        self._largest_peak = -1

    def moves(self, chunks: Sequence[StateChunk], memory: DeviceMemory) -> list[Move]:
        """Return evictions if memory is short, or promotions if memory has been free for long enough.

        `chunks` are all chunks in index order; `memory` is the device's memory before the next step.
        """
        peak = self.stats.max_non_model
        if peak is None:
            return []
        on_device = sum(chunk.num_bytes for chunk in chunks if not chunk.is_on_host)
        free = memory.usable_bytes - memory.fixed_bytes - on_device - peak - self._threshold
        if free < 0:
            reason = f"{size_text(-free)} short of the largest peak, {size_text(peak)}"
            return self.evict(chunks, -free, reason)
        if peak > self._largest_peak:
            self._free.clear()
        self._largest_peak = peak
        self._free.append(free)
        if len(self._free) < self._patience:
            return []
        min_free = min(self._free)
        promotions = _promotions(chunks, min_free, f"{size_text(min_free)} free beside {size_text(peak)}")
        if promotions:
            self._free.clear()
        return promotions

    def evict(
        self, chunks: Sequence[StateChunk], num_bytes: int, reason: str = _OUT_OF_MEMORY
    ) -> list[Move]:
        """Return moves that free at least `num_bytes` on the device, or all chunks on the device."""
        evictions = _evictions(chunks, num_bytes, reason)
        if evictions:
            self.back_off()
        self._free.clear()
        return evictions

    def back_off(self) -> None:
        """Wait longer before the next promotion, after an eviction or a promotion that ran out of memory."""
        self._patience = min(max(WINDOW, 2 * self._patience), _MAX_PATIENCE)
        self._free = deque(maxlen=self._patience)


_STEPS = 4
"""Steps whose times are averaged before each choice of the streamed share."""
_HYSTERESIS = 0.1
"""The share stays if host and device end within this part of the later one's time."""
_GOLDEN = 0.6180339887498949


def spread(chunks: Sequence[StateChunk], number: int) -> set[StateChunk]:
    """Return `number` of the chunks, evenly spread over their indices; a larger number adds to them.

    So device and host both begin with parameters that are needed early, and few chunks move.
    """
    return set(sorted(chunks, key=lambda chunk: chunk.index * _GOLDEN % 1.0)[:number])


class StreamedShare:
    """Chooses which chunks on the host the device updates, so that host and device end at the same time.

    Both begin when the gradient norm is known. Each time is about proportional to the elements that are
    updated from then on, so their measured rates give the number of chunks between which the gap closes. The
    share goes half of this way at once, or by one chunk, which measures a rate that is still unknown.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[LateUpdates, LateUpdates]] = []
        """The late updates of complete steps since the last choice: those of the host, and streamed ones."""
        self.has_given_up = False
        """Whether memory for streaming is missing, so that no chunk is chosen any more."""
        self._number = 0
        self._rates = [0.0, 0.0]
        """The last measured seconds per element, on the host and streamed; 0 while unknown."""

    def moves(self, chunks: Sequence[StateChunk]) -> list[Move]:
        """Return chunks whose updates go over to device or host; `chunks` are all that may be streamed."""
        reason = "no memory to stream more" if self.has_given_up else "few chunks on the host"
        if len(self.steps) > _STEPS:
            host, streamed = (self._mean_seconds(index) for index in (0, 1))
            self._number += self._change(host - streamed, max(host, streamed), chunks)
            self.steps.clear()
            reason = f"after the norm: host {host:.3f} s, device {streamed:.3f} s"
        is_pointless = self.has_given_up or len(chunks) <= 2 * NUM_STREAMED  # buffers take the room of chunks
        self._number = 0 if is_pointless else min(max(self._number, 0), len(chunks))
        wanted = spread(chunks, self._number)
        changed = [chunk for chunk in chunks if chunk.is_streamed != (chunk in wanted)]
        return [Move(chunk, True, reason, chunk in wanted) for chunk in changed]

    def _mean_seconds(self, index: int) -> float:
        """Return the mean seconds of late updates, and note their rate. The first step may precede a move."""
        seconds, numel = (sum(values) for values in zip(*(s[index] for s in self.steps[1:]), strict=True))
        self._rates[index] = seconds / numel if numel else self._rates[index]
        return seconds / (len(self.steps) - 1)

    def _change(self, gap: float, longest: float, chunks: Sequence[StateChunk]) -> int:
        if not chunks or abs(gap) <= _HYSTERESIS * longest:
            return 0
        if not all(self._rates):
            return 1 if gap > 0 else -1
        per_chunk = sum(self._rates) * sum(chunk.numel for chunk in chunks) / len(chunks)
        return int(gap / per_chunk / 2 + math.copysign(0.5, gap))


def _evictions(chunks: Sequence[StateChunk], num_bytes: int, reason: str) -> list[Move]:
    moves, freed = [], 0
    for chunk in chunks:
        if freed >= num_bytes:
            break
        if not chunk.is_on_host:
            moves.append(Move(chunk, True, reason))
            freed += chunk.num_bytes
    return moves


def _promotions(chunks: Sequence[StateChunk], free: int, reason: str) -> list[Move]:
    moves = []
    for chunk in reversed(chunks):
        if chunk.is_on_host and not chunk.stays_on_host:
            free -= chunk.num_bytes
            if free < 0:
                break
            moves.append(Move(chunk, False, reason))
    return moves
