"""Predicted and measured step times in the log."""

import pytest

from patch.optimizer import OptimizerReport
from patch.training.run_hooks import StepTimeForecast


def report(offload_fraction: float, busy: float, waited: float) -> OptimizerReport:
    return OptimizerReport(8, 100, 800, 800, offload_fraction, busy, waited, 0)


def test_predicted_and_measured_step_times_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    forecast = StepTimeForecast(report(1.0, 0.0, 0.0))
    all_busy = all_waited = 0.0
    with caplog.at_level("INFO"):
        for seconds, fraction, busy, waited in [
            (1.0, 1.0, 0.8, 0.5),  # 0.3 s are hidden
            (1.0, 1.0, 0.8, 0.5),
            (9.9, 0.5, 0.4, 0.1),  # holds the move
            (0.63, 0.5, 0.4, 0.1),
            (0.6, 0.5, 0.4, 0.1),
            (0.7, 0.25, 0.2, 0.0),
            (0.51, 0.25, 0.2, 0.0),
        ]:
            all_busy, all_waited = all_busy + busy, all_waited + waited
            forecast.note(seconds, report(fraction, all_busy, all_waited))
    assert caplog.messages == [
        "optimizer offload: fraction 0.500: 600.0 ms predicted, 630.0 ms measured, 1000.0 ms before",
        "optimizer offload: fraction 0.250: 500.0 ms predicted, 510.0 ms measured, 600.0 ms before",
    ]
