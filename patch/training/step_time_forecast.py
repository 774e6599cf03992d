"""How long steps will take at another offloaded fraction, beside how long they take."""

from __future__ import annotations

from typing import NamedTuple

from patch.logger import get_logger
from patch.optimizer import OptimizerReport, OverlappedDistributedOptimizer
from patch.training.hooks import TrainerHook

_log = get_logger(__name__)


class _Step(NamedTuple):
    """What one step took."""

    seconds: float
    host_wait_s: float
    """Seconds that somebody waited for the host's updates."""
    host_busy_s: float
    """Seconds that the host updated chunks."""


class StepTimeForecast:
    """Logs how long steps were to take at another offloaded fraction, and how long they take.

    The host hid part of its work behind the device's, and will hide as much of any other amount; what is
    beyond that is waited for. The update on the device is left out: it is short.

    Args:
        start: the optimizer's report before the first step.
    """

    def __init__(self, start: OptimizerReport) -> None:
        self._last = start
        self._before: _Step | None = None
        """The last step without a move before it."""
        self._predicted: float | None = None

    def note(self, seconds: float, report: OptimizerReport) -> None:
        """Take in a step.

        Args:
            seconds: how long it lasted. report: the optimizer's report after it.
        """
        waited = report.host_wait_s - self._last.host_wait_s
        step = _Step(seconds, waited, report.host_busy_s - self._last.host_busy_s)
        fraction, last_fraction = report.offload_fraction, self._last.offload_fraction
        self._last = report
        if fraction != last_fraction:  # this step holds the move itself: the next one counts
            self._predicted = self._predict(fraction, last_fraction)
            return
        if self._predicted is not None and self._before is not None:
            _log.info(
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
    """Gives the forecast what each step took. Every rank has one: each moves its own states."""

    def __init__(self, optimizer: OverlappedDistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._forecast = StepTimeForecast(optimizer.report())

    def on_step(self, iteration: int, seconds: float) -> None:
        """Take in the time of a step."""
        self._forecast.note(seconds, self._optimizer.report())
