"""Progress of long work: a bar on a terminal, a line in the log every ten seconds anywhere else."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from patch.logger import get_logger

_logger = get_logger(__name__)

LINE_EVERY_S = 10.0


class LineTimer:
    """Timer that decides when the next progress line is due, and measures how long the work takes."""

    def __init__(self, *, due_at_once: bool = False) -> None:
        self._began = time.monotonic()
        self._last_line = float("-inf") if due_at_once else self._began

    def is_due(self) -> bool:
        """Return whether ten seconds have passed since this last returned True."""
        now = time.monotonic()
        if now - self._last_line < LINE_EVERY_S:
            return False
        self._last_line = now
        return True

    def elapsed_s(self) -> float:
        """Return the seconds since the work began."""
        return time.monotonic() - self._began

    def seconds_left(self, done: float, total: float) -> float:
        """Estimate the seconds until `total` is done, if `done` (above 0) took the time so far."""
        return self.elapsed_s() / done * (total - done)


class ProgressBar:
    """A bar on stderr, with the project's log lines above it, until `close`.

    Args:
        columns: shown between the bar and the time left.
    """

    def __init__(
        self, title: str, total: float, *columns: ProgressColumn, completed: int = 0, **fields: Any
    ) -> None:
        parts = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
        self._bar = Progress(*parts, console=Console(stderr=True))
        self._task = self._bar.add_task(title, total=total, completed=completed, **fields)
        self._bar.start()
        _log_to_stderr()

    def update(self, completed: float, **fields: Any) -> None:
        """Show how much of the total is done, and new values of the fields."""
        self._bar.update(self._task, completed=completed, **fields)

    def print(self, message: str) -> None:
        """Print a line above the bar."""
        self._bar.console.print(message)

    def close(self) -> None:
        """Stop drawing the bar."""
        self._bar.stop()
        _log_to_stderr()


@contextmanager
def shown_progress(
    title: str, total: float, *columns: ProgressColumn
) -> Iterator[Callable[[float, str], None]]:
    """Show the progress of a `with` block on stderr.

    Args:
        columns: see `ProgressBar`; by default the words.
    Yields:
        a function that the block calls with how much of the total is done, and the same in words.
    """
    columns = columns or (TextColumn("{task.fields[words]}"),)
    bar = ProgressBar(title, total, *columns, words="") if is_terminal() else None
    timer = LineTimer()

    def show(done: float, words: str) -> None:
        if bar is not None:
            bar.update(done, words=words)
        elif timer.is_due():
            left_s = timer.seconds_left(max(done, 1e-6 * total), total)
            _logger.info("%s: %s, %.0f s left", title, words, left_s)

    try:
        yield show
    finally:
        if bar is not None:
            bar.close()


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a `with` block that reads or writes bytes, on stderr.

    Yields:
        a function that the block calls with the number of bytes after each part.
    """
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        show(done, f"{done / 2**30:.2f} of {total_bytes / 2**30:.2f} GiB")

    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    with shown_progress(title, total_bytes, *columns) as show:
        yield advance


def is_terminal() -> bool:
    """Return whether stderr is a terminal, which can show a bar."""
    return sys.stderr.isatty()


def _log_to_stderr() -> None:
    """Send the project's log to the current sys.stderr, which a bar replaces to keep lines above itself."""
    for handler in get_logger("patch").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
