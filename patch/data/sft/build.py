"""Tokenizes the files of a set, by several processes, in the order of the rows, in bounded memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.progress import TextColumn
from transformers import PreTrainedTokenizerBase

from patch.data.readers import read_rows
from patch.data.rendering.bounded_process import BoundedMap, ChildEndedError
from patch.data.sft.options import SftOptions
from patch.data.sft.report import SetReport
from patch.data.sft.rows import Item, RowTokenizer, TokenizedRow
from patch.data.sft.token_files import TokenWriter
from patch.logger import get_logger
from patch.progress import LineTimer, ProgressBar, is_terminal

_logger = get_logger(__name__)

_ROWS_AT_ONCE = 256
_BYTES_AT_ONCE = 1 << 18
"""Limits of one batch. Each worker has one, and a few more wait, so they also limit the memory."""
_BAR_STEPS = 1000
_PARALLEL_TOKENIZERS = "TOKENIZERS_PARALLELISM"

Work = Callable[[Iterable[list[Item]]], Iterator[tuple[list[Item], list[TokenizedRow]]]]
"""For batches of rows: each batch and what became of its rows, in order. It raises a DataError for a row of
no known format, or one that cannot be rendered or encoded."""


def tokenize(
    files: Sequence[Path],
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    options: SftOptions,
    length: int,
    writer: TokenWriter,
) -> SetReport:
    """Tokenize the rows of files, write the samples, and report.

    Args:
        files: the files of the set.
        name: of the set, for the progress and the report.
        tokenizer: renders and encodes the rows.
        options: how rows become samples, and how many processes share the work.
        length: tokens of a sample.
        writer: gets the samples.

    Raises:
        DataError: a row cannot be read, is of no known format, or cannot be rendered or encoded.
        TrainingError: the processes cannot be started.
        OSError: the samples cannot be written.
    """
    report = SetReport(
        length,
        options.long_samples,
        options.render.allow_special_tokens,
        unseen_columns=dict(options.format.columns),
    )
    reading = _Reading(files, names_of(files))
    tokenized = start_workers(tokenizer, options, length)
    with _progress(name, reading, report) as show:
        for items, rows in tokenized(reading.batches()):
            for item, row in zip(items, rows, strict=True):
                report.add(item.place, row)
            writer.write(
                b"".join(row.ids for row in rows),
                b"".join(row.learned for row in rows),
                [size for row in rows for size in row.sizes],
            )
            writer.share = reading.share
            show()
    return report


def start_workers(tokenizer: PreTrainedTokenizerBase, options: SftOptions, length: int) -> Work:
    """Start the processes that tokenize rows; they end with the function that is returned.

    Args:
        tokenizer: renders and encodes the rows.
        options: how rows become samples, and how many processes share the work.
        length: tokens of a sample.

    Raises:
        TrainingError: the processes cannot be started.
    """
    work = RowTokenizer(tokenizer, options, length)
    with _without_threads_of_tokenizers():
        rows: BoundedMap[Item, TokenizedRow] = BoundedMap(work, options.num_workers)

    def tokenized(batches: Iterable[list[Item]]) -> Iterator[tuple[list[Item], list[TokenizedRow]]]:
        try:
            yield from rows(batches)
        except ChildEndedError as error:
            raise work.blame(error) from error

    return tokenized


def names_of(files: Sequence[Path]) -> list[str]:
    """For each file of a set, what stands before "line 7" in the report: nothing if there is one file."""
    if len(files) == 1:
        return [""]
    folder = Path(os.path.commonpath([file.parent for file in files]))
    return [f"{file.relative_to(folder)}: " for file in files]


class _Reading:
    """Reads the rows of files in batches, and knows how much is read.

    Args:
        files: the files.
        names: the name of each in the report.
    """

    def __init__(self, files: Sequence[Path], names: Sequence[str]) -> None:
        self._files, self._names = files, names
        self._sizes = [file.stat().st_size for file in files]
        self._num_done = 0
        """Bytes of the files that have been read."""
        self._num_read = 0
        """Bytes of the rows of the present file: of plain JSON about as many as were read of the file."""
        self._size = 0
        """Bytes of the present file."""

    @property
    def share(self) -> float:
        """The share of all bytes that is read, estimated."""
        return (self._num_done + min(self._num_read, self._size)) / max(1, sum(self._sizes))

    def batches(self) -> Iterator[list[Item]]:
        """The rows of all files, in order."""
        batch: list[Item] = []
        num_bytes = 0
        for item in self._items():
            batch.append(item)
            num_bytes += len(item.value)
            if len(batch) >= _ROWS_AT_ONCE or num_bytes >= _BYTES_AT_ONCE:
                yield batch
                batch, num_bytes = [], 0
        if batch:
            yield batch

    def _items(self) -> Iterator[Item]:
        for file, name, size in zip(self._files, self._names, self._sizes, strict=True):
            self._size = size
            for row in read_rows(file):
                value = pickle.dumps(row.value)
                self._num_read += len(value)
                yield Item(f"{file}: {row.place}", name + row.place, value)
            self._num_done += self._size
            self._num_read = self._size = 0


@contextmanager
def _without_threads_of_tokenizers() -> Iterator[None]:
    """The children that are forked here encode without threads, which do not survive a fork."""
    before = os.environ.get(_PARALLEL_TOKENIZERS)
    os.environ[_PARALLEL_TOKENIZERS] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLEL_TOKENIZERS]
        else:
            os.environ[_PARALLEL_TOKENIZERS] = before


@contextmanager
def _progress(name: str, reading: _Reading, report: SetReport) -> Iterator[Callable[[], None]]:
    """Gives a function that shows how far the work is: with a bar on a terminal, with log lines elsewhere."""
    if not is_terminal():
        yield partial(_log_progress, LineTimer(), name, reading, report)
        return
    bar = ProgressBar(f"tokenizing {name}", _BAR_STEPS, TextColumn("{task.fields[rows]} rows"), rows=0)
    try:
        yield lambda: bar.update(int(_BAR_STEPS * reading.share), rows=report.rows)
    finally:
        bar.close()


def _log_progress(timer: LineTimer, name: str, reading: _Reading, report: SetReport) -> None:
    if timer.is_due():
        left = timer.seconds_left(reading.share, 1.0)
        _logger.info("tokenizing %s: %d rows, about %.0f s left", name, report.rows, left)
