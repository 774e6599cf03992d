"""Predicts the step time after a change of the offload fraction and logs it beside the measured time."""

from __future__ import annotations

from typing import NamedTuple

from patch.logger import get_logger
from patch.optimizer import OptimizerReport, OverlappedDistributedOptimizer
from patch.training.hooks import TrainerHook

_logger = get_logger(__name__)


class _Step(NamedTuple):
    """Times of one step."""

    seconds: float
    host_wait_s: float
    """Seconds that the step waited for updates on the host."""
    host_busy_s: float
    """Seconds that the host spent on updating chunks."""


class StepTimeForecast:
    """Predicts the step time when the offload fraction changes, and logs it with the measured time.

    Model: the part of the host's work that overlapped with the device's work stays the same in seconds; the
        rest
    of the host's work at the new fraction adds to the step. The update on the device is short and ignored.

    Args:
        start: the optimizer's report before the first step.
    """

    def __init__(self, start: OptimizerReport) -> None:
        self._last = start
        self._before: _Step | None = None
        """The last step without a move before it."""
        self._predicted: float | None = None

    def note(self, seconds: float, report: OptimizerReport) -> None:
        """Record a step.

        Args:
            seconds: the time of the step.
            report: the optimizer's report after the step.
        """
        waited = report.host_wait_s - self._last.host_wait_s
        step = _Step(seconds, waited, report.host_busy_s - self._last.host_busy_s)
        fraction, last_fraction = report.offload_fraction, self._last.offload_fraction
        self._last = report
        if fraction != last_fraction:  # this step contains the move itself; measure the next one
            self._predicted = self._predict(fraction, last_fraction)
            return
        if self._predicted is not None and self._before is not None:
            _logger.info(
                "optimizer offload: fraction %.3f: %.1f ms predicted, %.1f ms measured, %.1f ms before",
                fraction, self._predicted * 1e3, seconds * 1e3, self._before.seconds * 1e3,
            )  # fmt: skip
            self._predicted = None
        self._before = step

    def _predict(self, fraction: float, last_fraction: float) -> float | None:
        if self._before is None or not last_fraction:
            return None
        seconds, waited, busy = self._before
        hidden = max(0.0, busy - waited)
        return seconds - waited + max(0.0, busy * fraction / last_fraction - hidden)


class StepTimeHook(TrainerHook):
    """Passes the time of each step to the forecast. Every rank has one, because each moves its own states."""

    def __init__(self, optimizer: OverlappedDistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._forecast = StepTimeForecast(optimizer.report())

    def on_step(self, iteration: int, seconds: float) -> None:
        """Record the time of a step."""
        self._forecast.note(seconds, self._optimizer.report())
