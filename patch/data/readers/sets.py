"""Reads the files of a set in batches of about equal work, and shows how far that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

from rich.progress import TextColumn

from patch.data.readers.rows import Row, read_rows
from patch.logger import get_logger
from patch.progress import LineTimer, ProgressBar, is_terminal

_logger = get_logger(__name__)

_BAR_STEPS = 1000
Made = TypeVar("Made")


class SetReader(Generic[Made]):
    """What is made of the rows of files, and how much of the files has been read.

    Args:
        files: read in this order.
        make: from a file and its row, what is wanted, and its size: of plain JSON about as many bytes as were
            read of the file.
        most_rows: a batch has no more.
        most_bytes: a batch ends with the row that reaches this size.
    """

    def __init__(
        self,
        files: Sequence[Path],
        make: Callable[[Path, Row], tuple[Made, int]],
        most_rows: int,
        most_bytes: int,
    ) -> None:
        self._files, self._make = files, make
        self._most_rows, self._most_bytes = most_rows, most_bytes
        self._sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
        self._read = 0
        """Bytes of the files that were read, estimated."""

    @property
    def share(self) -> float:
        """The share of all bytes that is read, estimated."""
        return self._read / max(1, sum(self._sizes))

    def batches(self) -> Iterator[list[Made]]:
        """What is made of all rows, in order."""
        batch: list[Made] = []
        num_bytes = end = 0
        for file, size in zip(self._files, self._sizes, strict=True):
            end += size
            for row in read_rows(file):
                made, length = self._make(file, row)
                self._read = min(end, self._read + length)
                batch.append(made)
                num_bytes += length
                if len(batch) >= self._most_rows or num_bytes >= self._most_bytes:
                    yield batch
                    batch, num_bytes = [], 0
            self._read = end
        if batch:
            yield batch


@contextmanager
def shown_progress(title: str, reader: SetReader[Made]) -> Iterator[Callable[[str], None]]:
    """A context with a function that shows how far the work is: in a bar on a terminal, else in log lines.

    Args:
        title: what is done.
        reader: knows how much is read.
    Yields:
        the function; it is given what was done, such as "12 rows".
    """
    timer = LineTimer()

    def log(done: str) -> None:
        if timer.is_due():
            left_s = timer.seconds_left(max(reader.share, 1e-6), 1.0)
            _logger.info("%s: %s, about %.0f s left", title, done, left_s)

    if not is_terminal():
        yield log
        return
    bar = ProgressBar(title, _BAR_STEPS, TextColumn("{task.fields[done]}"), done="")
    try:
        yield lambda done: bar.update(int(_BAR_STEPS * reader.share), done=done)
    finally:
        bar.close()
