"""Reads the documents of a pre-training set from files of rows, and shows how far that is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import TextColumn

from patch.data.formats import missing_keys
from patch.data.readers import Row, read_rows
from patch.errors import DataError
from patch.logger import get_logger
from patch.progress import LineTimer, ProgressBar, is_terminal

_logger = get_logger(__name__)

Document = list[str]
"""A document: its sentences, which Megatron-LM's index lists one by one. Most documents are one text."""
_ROWS_AT_ONCE = 1000
_CHARACTERS_AT_ONCE = 1 << 20
"""A batch ends with the row that passes this."""
_BAR_STEPS = 1000


class DocumentReader:
    """The rows of files as documents, and how much of the files has been read.

    Args:
        files: read in this order.
        keys: of the texts in a row.
    """

    def __init__(self, files: Sequence[Path], keys: Sequence[str]) -> None:
        self._files, self._keys = files, keys
        self._sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
        self._done = self._read = 0
        """Bytes of the files before the present one; characters of the texts in it, which are nearly its
        bytes if it is plain JSON."""

    @property
    def share(self) -> float:
        """The share of all bytes that is read, estimated."""
        return min(1.0, (self._done + self._read) / max(1, sum(self._sizes)))

    def batches(self) -> Iterator[list[tuple[Document, ...]]]:
        """The documents of all rows, one a key, in batches of about equal work."""
        rows: list[tuple[Document, ...]] = []
        characters = 0
        for row in self._rows():
            rows.append(row)
            characters += _num_characters(row)
            if len(rows) == _ROWS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
                yield rows
                rows, characters = [], 0
        if rows:
            yield rows

    def _rows(self) -> Iterator[tuple[Document, ...]]:
        for file, size in zip(self._files, self._sizes, strict=True):
            for row in read_rows(file):
                documents = tuple(_document(row, key, f"{file}: {row.place}") for key in self._keys)
                self._read = min(size, self._read + _num_characters(documents))
                yield documents
            self._done, self._read = self._done + size, 0


@contextmanager
def progress_of(reading: DocumentReader) -> Iterator[Callable[[int, int], None]]:
    """Gives a function that shows documents and tokens: in a bar on a terminal, in log lines elsewhere."""
    timer = LineTimer()

    def log(documents: int, tokens: int) -> None:
        if timer.is_due():
            rate, left = tokens / timer.elapsed_s(), timer.seconds_left(max(reading.share, 1e-6), 1.0)
            _logger.info(
                "%d documents, %d tokens, %.0f tokens/s, about %.0f s left", documents, tokens, rate, left
            )

    if not is_terminal():
        yield log
        return
    column = TextColumn("{task.fields[documents]} documents, {task.fields[tokens]} tokens")
    bar = ProgressBar("tokenizing", _BAR_STEPS, column, documents=0, tokens=0)
    try:
        yield lambda documents, tokens: bar.update(
            int(_BAR_STEPS * reading.share), documents=documents, tokens=tokens
        )
    finally:
        bar.close()


def _num_characters(documents: tuple[Document, ...]) -> int:
    return sum(len(sentence) for document in documents for sentence in document)


def _document(row: Row, key: str, where: str) -> Document:
    if key not in row.value:
        raise DataError(f"{where}: {missing_keys(row.value, f'{key} (--json-keys)', [key])}")
    text = row.value[key]
    sentences = text if isinstance(text, list) else [text]
    if not all(isinstance(sentence, str) for sentence in sentences):
        raise DataError(f"{where}: {key}: got {text!r:.60}, expected text, or a list of texts")
    return sentences
