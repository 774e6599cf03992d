"""How far long work on bytes is, as lines in the log where there is no terminal."""

import logging

import pytest

from patch.progress import progress


def test_lines_tell_the_bytes_so_far(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("patch.progress.LINE_EVERY_S", 0.0)
    monkeypatch.setattr(logging.getLogger("patch"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="patch"), progress("model", 4 * 2**30) as advance:
        advance(2**30)
        advance(3 * 2**30)
    first, last = caplog.messages
    assert first.startswith("model: 1.00 of 4.00 GiB, ")
    assert last == "model: 4.00 of 4.00 GiB, 0 s left"
