"""How far a conversion is: a bar with bytes and time left on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress import TransferSpeedColumn as SpeedColumn

from patch.logger import get_logger

_logger = get_logger(__name__)
_LINE_EVERY_S = 10.0


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of the block on stderr; it calls what it is given with the bytes of each part."""
    if not sys.stderr.isatty():
        yield _Lines(title, total_bytes)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        SpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda done: bar.advance(task, done)


class _Lines:
    """A line in the log every ten seconds."""

    def __init__(self, title: str, total_bytes: int) -> None:
        self._title, self._total, self._done = title, total_bytes, 0
        self._began = self._last = time.monotonic()

    def __call__(self, done: int) -> None:
        self._done += done
        now = time.monotonic()
        if now - self._last >= _LINE_EVERY_S:
            self._last = now
            left = (now - self._began) / self._done * (self._total - self._done)
            _logger.info(
                "%s: %.2f of %.2f GiB, %.0f s left",
                self._title, self._done / 2**30, self._total / 2**30, left,
            )  # fmt: skip
