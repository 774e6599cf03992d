"""Progress of a conversion: a bar with bytes and time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import DownloadColumn, TransferSpeedColumn

from patch.logger import get_logger
from patch.progress import LineTimer, ProgressBar, is_terminal

_logger = get_logger(__name__)


@contextmanager
def progress(title: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of the `with` block on stderr.

    Args:
        title: the name of the conversion.
        total_bytes: the bytes of the whole conversion.
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
