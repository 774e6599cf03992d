"""When a line about progress is due, on the clock of this machine, and what it says of bytes."""

import logging
import time

import pytest

from patch import progress
from patch.progress import LineTimer


def test_a_line_is_due_once_in_each_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.2)
    patient, eager = LineTimer(), LineTimer(due_at_once=True)
    assert (patient.is_due(), eager.is_due()) == (False, True)
    assert not eager.is_due()
    time.sleep(0.25)
    assert patient.is_due() and eager.is_due()
    assert not patient.is_due() and not eager.is_due()


def test_time_left_goes_on_at_the_rate_so_far() -> None:
    timer = LineTimer()
    time.sleep(0.05)
    assert timer.seconds_left(1, 5) == pytest.approx(4 * timer.elapsed_s(), rel=0.2)


def test_lines_tell_the_bytes_so_far(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.0)
    monkeypatch.setattr(logging.getLogger("patch"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="patch"), progress.progress("model", 4 * 2**30) as advance:
        advance(2**30)
        advance(3 * 2**30)
    first, last = caplog.messages
    assert first.startswith("model: 1.00 of 4.00 GiB, ")
    assert last == "model: 4.00 of 4.00 GiB, 0 s left"
