"""Notes of what a rank does now, for the hang guard: the main thread writes them, others read them.

A note costs about a microsecond. There is no lock: for the threads of the process it is one assignment. Other
processes of the machine read it in shared memory, also when this process is stopped.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from patch.checkpoint.save import Writing
from patch.compat.torch_internals import Phases

_SHARE_OF_STEP = 0.05
"""Weight of the newest step in the mean of a rank's own time."""
_LARGEST_RATIO = 3.0
"""Largest value of a step in that mean, as a multiple of it."""
_RECORD = struct.Struct("=qq")
"""In shared memory: the index of the phase, and the steps done."""


class Phase(StrEnum):
    """The parts of a run that the guard tells apart."""

    SETUP = "set-up"
    READING = "data reading"
    FORWARD = "forward"
    BACKWARD = "backward"
    REDUCTION = "reduction"
    UPDATE = "update"
    METRICS = "metrics"
    EVALUATION = "evaluation"
    SAVE = "save"
    END = "clean-up or export"
    DONE = "leaving"


_PHASES = list(Phase)
_INDEX = {phase: index for index, phase in enumerate(_PHASES)}


class Note(NamedTuple):
    """Phase and progress of a rank."""

    phase: Phase
    since: float
    """Time of its last progress, by time.monotonic()."""
    num_entered: int
    """Phases entered since the start. All ranks go through the same phases, so the smallest number is behind.
    Ranks of a pipeline take turns in forward and backward, which count as one phase."""


class PhaseClock:
    """The notes of one rank."""

    def __init__(self) -> None:
        self.note = Note(Phase.SETUP, time.monotonic(), 0)
        self.num_before = 0
        """Steps done before this start of the run."""
        self.num_steps = 0
        """Steps done since the start."""
        self.step_s = 0.0
        """The time of the slowest step after the first one."""
        self.own_ms = 0.0
        """A running mean of the time of a step in which this rank did not wait for the others' gradients."""
        self.writing: Callable[[], Writing | None] = lambda: None
        """Gives this rank's progress in writing a checkpoint; None: it writes none."""
        self._regions = Phases()
        self.shared: mmap.mmap | None = None
        """Memory from `shared_memory` that gets the notes, too."""

    def enter(self, phase: Phase) -> None:
        """Note that a phase begins; all ranks call it in the same order."""
        self._set(phase, self.note.num_entered + 1)

    def go_on(self, phase: Phase) -> None:
        """Note progress; in a step also whether it is in forward or backward.

        Args:
            phase: FORWARD or BACKWARD.
        """
        current = self.note.phase
        is_step = current in (Phase.FORWARD, Phase.BACKWARD)
        self._set(phase if is_step else current, self.note.num_entered)

    def _set(self, phase: Phase, num_entered: int) -> None:
        if phase != self.note.phase or num_entered != self.note.num_entered:
            self._regions.begin(phase)
        self.note = Note(phase, time.monotonic(), num_entered)
        if self.shared is not None:
            _RECORD.pack_into(self.shared, 0, _INDEX[phase], self.num_steps)

    def end_region(self) -> None:
        """End the phase in the trace of a profiler: what follows belongs to none."""
        self._regions.end()

    def end_step(self, seconds: float, waited_ms: float) -> None:
        """Note that a step is done.

        Args:
            seconds: its time.
            waited_ms: how long this rank's compute waited for communication.
        """
        own_ms = max(0.0, seconds * 1e3 - waited_ms)
        if self.num_steps == 1:  # the first step is not like the others
            self.own_ms = own_ms
        if self.num_steps:
            self.step_s = max(self.step_s, seconds)
            # Not once a slow rank is one whose machine stood still for a minute.
            self.own_ms += _SHARE_OF_STEP * (min(own_ms, _LARGEST_RATIO * self.own_ms) - self.own_ms)
        self.num_steps += 1


def shared_memory() -> tuple[mmap.mmap, int]:
    """Memory for `PhaseClock.shared`, and its file descriptor, by which other processes find it."""
    descriptor = os.memfd_create("phase")
    os.ftruncate(descriptor, _RECORD.size)
    return mmap.mmap(descriptor, _RECORD.size), descriptor


def read_shared(pid: int, descriptor: int) -> tuple[str, int] | None:
    """The phase of another process of this machine, and its steps done.

    Args:
        pid: of the process.
        descriptor: of its shared memory.
    Returns:
        None if it cannot be read.
    """
    try:
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            index, num_steps = _RECORD.unpack(file.read(_RECORD.size))
        return _PHASES[index], num_steps
    except (OSError, struct.error, IndexError):
        return None
