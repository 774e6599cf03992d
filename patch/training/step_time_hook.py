"""Step times before and after optimizer states move, told in the log beside the time that was predicted."""

from __future__ import annotations

from patch.optimizer import OverlappedDistributedOptimizer
from patch.training.hooks import TrainerHook
from patch.training.offload import StepTimes


class StepTimeHook(TrainerHook):
    """Every rank has one: each moves its own states."""

    def __init__(self, optimizer: OverlappedDistributedOptimizer) -> None:
        self._step_times = StepTimes(optimizer.adam)

    def on_step(self, iteration: int, seconds: float) -> None:
        """Take in the time of a step."""
        self._step_times.note(seconds)
