"""What a run says: who speaks, when a line about progress is due, and sizes as a person would write them."""

import logging
import time

import pytest

from patch import progress
from patch.errors import DataError
from patch.logger import configure_logging, get_logger
from patch.progress import LineTimer
from patch.text import size_text, timed


@pytest.mark.parametrize("rank,expected", [(0, ["plain", "every", "wrong"]), (3, ["every", "wrong"])])
def test_what_a_rank_says(rank: int, expected: list[str], capsys: pytest.CaptureFixture) -> None:
    configure_logging(rank=rank)
    get_logger("patch.part").info("plain")
    get_logger("patch.part", every_rank=True).info("every")
    get_logger("patch.part").error("wrong")
    assert [line.split()[-1] for line in capsys.readouterr().err.splitlines()] == expected


def test_text_of_a_file_cannot_act_on_a_terminal(capsys: pytest.CaptureFixture) -> None:
    configure_logging(rank=0)
    hostile, seen = "a\x1b[2J\r\nERROR b\x9b\u202e\udc80", r"a\x1b[2J\r\nERROR b\x9b\u202e\udc80"
    get_logger("patch.part").warning("key %s", hostile)
    get_logger("patch.part").error("%s", DataError(f"line 1: {hostile}\n  next \u4e09"))
    assert capsys.readouterr().err.splitlines() == [
        f"WARNING key {seen}", f"ERROR line 1: {seen}", "  next \u4e09"
    ]  # fmt: skip


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


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0.00 MiB"), (3 * 2**19, "1.50 MiB"), (2**29, "0.50 GiB"), (5 * 2**29, "2.50 GiB")],
)
def test_sizes_below_a_hundredth_of_a_gib_are_told_in_mib(size: int, words: str) -> None:
    assert size_text(size) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0123, "12.3 ms"), (4.314, "4.31 s"), (998.7, "999 s"), (1032.4, "1,032 s"), (1.47e6, "1,470,000 s")],
)
def test_seconds_have_three_digits_and_no_exponent(seconds: float, words: str) -> None:
    assert timed(seconds) == words
