"""The current phase of a rank: the training thread writes it, the hang guard's threads read it.

A write takes about a microsecond. It needs no lock, because it is one assignment.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import NamedTuple

from patch.compat.torch_internals import Phases


class Phase(StrEnum):
    """The phases of a run that the hang guard distinguishes."""

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
    """Time of the rank's last progress, by time.monotonic()."""
    num_entered: int
    """Phases entered since the start. All ranks enter the same phases, so the smallest number is behind.
    Forward and backward count as one phase, because pipeline ranks alternate between them."""


class PhaseClock:
    """The current phase and progress of one rank."""

    def __init__(self) -> None:
        self.note = Note(Phase.SETUP, time.monotonic(), 0)
        self.num_before = 0
        """Steps of earlier starts of the run."""
        self.num_steps = 0
        """Steps since this start of the run."""
        self.step_s = 0.0
        """The time of the slowest step, without the first step."""
        self.writing: Callable[[], object] = lambda: None
        """Function whose return value changes with any progress of this rank in writing a checkpoint."""
        self._regions = Phases()

    def enter(self, phase: Phase) -> None:
        """Begin a phase; all ranks call this in the same order."""
        self._set(phase, self.note.num_entered + 1)

    def go_on(self, phase: Phase) -> None:
        """Record progress; inside a step, also switch to `phase`, FORWARD or BACKWARD."""
        is_step = self.note.phase in (Phase.FORWARD, Phase.BACKWARD)
        self._set(phase if is_step else self.note.phase, self.note.num_entered)

    def _set(self, phase: Phase, num_entered: int) -> None:
        if phase != self.note.phase or num_entered != self.note.num_entered:
            self._regions.begin(phase)
        self.note = Note(phase, time.monotonic(), num_entered)

    def end_region(self) -> None:
        """End the phase's region in the profiler trace."""
        self._regions.end()

    def end_step(self, seconds: float) -> None:
        """Record the end of a step and its duration; the first step's duration is ignored."""
        self.step_s = max(self.step_s, seconds) if self.num_steps else 0.0
        self.num_steps += 1
