"""Notes of what a rank does now: the training thread writes them, the hang guard's threads read them.

A note costs about a microsecond. There is no lock: for the other threads it is one assignment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from patch.compat.torch_internals import Phases


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
        self.writing: Callable[[], object] = lambda: None
        """Gives this rank's progress in writing a checkpoint: any progress changes what it returns."""
        self._regions = Phases()

    def enter(self, phase: Phase) -> None:
        """Note that a phase begins; all ranks call it in the same order."""
        self._set(phase, self.note.num_entered + 1)

    def go_on(self, phase: Phase) -> None:
        """Note progress; in a step also whether it is in forward or backward.

        Args:
            phase: FORWARD or BACKWARD.
        """
        is_step = self.note.phase in (Phase.FORWARD, Phase.BACKWARD)
        self._set(phase if is_step else self.note.phase, self.note.num_entered)

    def _set(self, phase: Phase, num_entered: int) -> None:
        if phase != self.note.phase or num_entered != self.note.num_entered:
            self._regions.begin(phase)
        self.note = Note(phase, time.monotonic(), num_entered)

    def end_region(self) -> None:
        """End the phase in the trace of a profiler: what follows belongs to none."""
        self._regions.end()

    def end_step(self, seconds: float) -> None:
        """Note that a step is done, after so many seconds; the first one is not like the others."""
        self.step_s = max(self.step_s, seconds) if self.num_steps else 0.0
        self.num_steps += 1
