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
        self, title: str, total: int, *columns: ProgressColumn, completed: int = 0, **fields: Any
    ) -> None:
        parts = (TextColumn("{task.description}"), BarColumn(), *columns, TimeRemainingColumn())
        self._bar = Progress(*parts, console=Console(stderr=True))
        self._task = self._bar.add_task(title, total=total, completed=completed, **fields)
        self._bar.start()
        _log_to_stderr()

    def update(self, completed: int, **fields: Any) -> None:
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
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a `with` block that reads or writes bytes, on stderr.

    Yields:
        a function that the block calls with the number of bytes after each part.
    """
    columns = (DownloadColumn(binary_units=True), TransferSpeedColumn())
    bar = ProgressBar(title, total_bytes, *columns) if is_terminal() else None
    timer, done = LineTimer(), 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if bar is not None:
            bar.update(done)
        elif timer.is_due():
            left_s = timer.seconds_left(done, total_bytes)
            _logger.info(
                "%s: %.2f of %.2f GiB, %.0f s left", title, done / 2**30, total_bytes / 2**30, left_s
            )

    try:
        yield advance
    finally:
        if bar is not None:
            bar.close()


def is_terminal() -> bool:
    """Return whether stderr is a terminal, which can show a bar."""
    return sys.stderr.isatty()


def _log_to_stderr() -> None:
    """Send the project's log to the current sys.stderr, which a bar replaces to keep lines above itself."""
    for handler in get_logger("patch").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
