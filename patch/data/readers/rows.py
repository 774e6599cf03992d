"""Reads the rows of a file (JSON, JSONL, CSV, all also compressed, parquet or Arrow), and those of a set.

The file's first bytes decide what it is. CSV has none of its own, so there the name counts too. Memory does
not grow with the file: it holds one row, or one batch of a parquet file's rows.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from rich.progress import TextColumn

from patch.data.readers.json_rows import json_rows
from patch.data.readers.tables import KINDS, Reached, arrow_rows, csv_rows, text_rows
from patch.errors import DataError
from patch.logger import get_logger
from patch.progress import LineTimer, ProgressBar, is_terminal
from patch.storage.names import TABLES, TEXT
from patch.storage.places import open_to_read

_logger = get_logger(__name__)

_Places = Iterator[tuple[str, Any]]
Made = TypeVar("Made")
_BAR_STEPS = 1000
_LIST_KEY = "data"
_BEGINS_JSON = re.compile(rb'(\[\s*)?\{\s*"')
_BUFFER_BYTES = 1 << 18
_BOM = b"\xef\xbb\xbf"
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_OTHER_KINDS = {
    b"PK\x03\x04": "a zip archive, or the workbook of a spreadsheet; unpack it, or save the sheet as CSV",
    b"BZh": "compressed by bzip2; unpack it, or use gzip or zstd",
    b"\xfd7zXZ": "compressed by xz; unpack it, or use gzip or zstd",
    b"7z\xbc\xaf": "a 7z archive; unpack it",
    b"PARE": "an encrypted parquet file; decrypt it",
    b"\x89HDF": "an HDF5 file; write it as JSONL or parquet",
    b"\x80": "a Python pickle or other binary data; write it as JSONL or parquet",
    **dict.fromkeys(_CODECS, "compressed twice; unpack it"),
    **{magic: f"a compressed {kind} file or stream; unpack it" for magic, kind in KINDS.items()},
}
"""Files that users give by mistake: their first bytes, and what they are."""


class Row(NamedTuple):
    """One object of the file."""

    place: str
    """Its position, for messages: "line 7" of JSONL or CSV, "row 7" of a list or parquet; counted from 1."""
    value: dict[str, Any]


def read_rows(path: Path, *, splits_text: bool = False, reached: Reached | None = None) -> Iterator[Row]:
    """The rows of a file in their order.

    A file is a JSON list of objects, one JSON object on each line (JSONL), JSON objects one after another
    over any number of lines, one object with the list of them under `data`, CSV or TSV, any of these
    compressed by gzip or zstd; or parquet or Arrow. A UTF-8 byte-order mark and blank lines are skipped. In
    rows of a parquet or Arrow file, keys without a value (null) are absent. A .txt file that is no JSON is
    one row with the key `text`; with `splits_text` each run of lines between blank ones is a row.
    `reached` is kept up to date.

    Raises:
        DataError: the file cannot be read, is damaged, of another kind or in another encoding, has malformed
            JSON (the message names the line), a row over 256 MiB, a row that is not an object, or no rows; or
            there is not enough memory for a row. The rows before the fault are given first.
    """
    empty = True
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: is a pipe or a device, expected a file of rows")
    try:
        for place, value in _without_wrapper(_places_and_values(path, splits_text, reached or Reached())):
            if not isinstance(value, dict):
                raise DataError(f"{path}: {place}: got {_json_type(value)}, expected an object")
            empty = False
            yield Row(place, value)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error}; expected a file of rows"
        ) from error
    except MemoryError as error:
        raise DataError(f"{path}: there is not enough memory for a row of this file") from error
    if empty:
        raise DataError(f"{path}: has no rows, expected at least one JSON object")


def _without_wrapper(rows: _Places) -> _Places:
    """The rows; of a file that is one object, those under its key `data`."""
    first = next(rows, None)
    if first is None:
        return
    wrapped = first[1].get(_LIST_KEY) if isinstance(first[1], dict) else None
    if isinstance(wrapped, list) and wrapped and all(isinstance(value, dict) for value in wrapped):
        second = next(rows, None)
        if second is None:
            yield from ((f"row {number}", value) for number, value in enumerate(wrapped, start=1))
            return
        rows = chain([second], rows)
    yield from chain([first], rows)


def _places_and_values(path: Path, splits_text: bool, reached: Reached) -> _Places:
    size = max(1, path.stat().st_size)
    with open_to_read(path) as file:
        head = file.read(8)
        if (magic := _known(head, KINDS)) is not None:
            yield from arrow_rows(path, magic, reached)
            return
        file.seek(0)
        codec = _CODECS.get(_known(head, _CODECS) or b"")
        place = None
        try:
            with _opened(path, file, codec) as stream:
                endings, head = {ending.lower() for ending in path.suffixes[-2:]}, stream.peek().lstrip()
                read: Callable[[Path, io.BufferedReader], _Places] = json_rows
                if not endings.isdisjoint(TABLES) and head[:1] not in (b"{", b"["):
                    read = csv_rows
                elif TEXT in endings and not _BEGINS_JSON.match(head):
                    read = partial(text_rows, splits_text=splits_text)
                for place, value in read(path, stream):
                    reached.share = file.tell() / size
                    yield place, value
        except OSError as error:
            if codec is None or error.errno is not None:
                raise
            # pyarrow's errors have nothing but a text, such as "Truncated compressed stream".
            what = "ends early" if "Truncated" in str(error) else "is damaged"
            after = "in its first row" if place is None else f"after {place}"
            raise DataError(
                f"{path}: its {codec} data {what} {after} ({error}); expected a whole file: copy or make it "
                "again"
            ) from error


def _known(head: bytes, kinds: dict[bytes, str]) -> bytes | None:
    """The first bytes of the kind of which this is the beginning."""
    return next((magic for magic in kinds if head.startswith(magic)), None)


def _opened(path: Path, file: Any, codec: str | None) -> io.BufferedReader:
    """The text of a file, decompressed, from behind its byte-order mark; what is no UTF-8 text is refused."""
    if codec is not None:
        import pyarrow  # only tables and compressed files need it

        # It refuses data that ends early, and zstd windows over 128 MiB.
        file = pyarrow.CompressedInputStream(file, codec)
    stream = io.BufferedReader(file, _BUFFER_BYTES)
    head = stream.peek(8)
    kind = _OTHER_KINDS.get(_known(head, _OTHER_KINDS) or b"")
    if head[257:262] == b"ustar":
        kind = "a tar archive; unpack it"
    if kind is not None:
        raise DataError(f"{path}: is {kind}; expected JSON, JSONL, parquet, Arrow or CSV")
    encoding = json.detect_encoding(head) if head.strip(b"\0") else "utf-8"
    if not encoding.startswith("utf-8"):
        name = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
        raise DataError(
            f"{path}: is {name} text, expected UTF-8; convert it: iconv -f {name} -t UTF-8 FILE > NEW"
        )
    if head.startswith(_BOM):
        stream.read(len(_BOM))
    return stream


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


class SetReader(Generic[Made]):
    """Reads the rows of files in batches, and knows how much of the files has been read.

    Args:
        files: read in this order.
        make: from a file and its row, what is wanted, and its size: of plain JSON about as many bytes as were
            read of the file.
        most_rows: a batch has no more.
        most_bytes: a batch ends with the row that reaches this size.
        splits_text: see `read_rows`.
    """

    def __init__(
        self,
        files: Sequence[Path],
        make: Callable[[Path, Row], tuple[Made, int]],
        most_rows: int,
        most_bytes: int,
        splits_text: bool = False,
    ) -> None:
        self._files, self._make, self._splits_text = files, make, splits_text
        self._most_rows, self._most_bytes = most_rows, most_bytes
        self._sizes = [file.stat().st_size if file.is_file() else 0 for file in files]
        self._read = 0
        """Bytes of the files that were read, estimated."""

    @property
    def share(self) -> float:
        """The share of all bytes that is read, estimated."""
        return self._read / max(1, sum(self._sizes))

    def batches(self) -> Iterator[list[Made]]:
        """The results for all rows, in order."""
        batch: list[Made] = []
        num_bytes = end = 0
        for file, size in zip(self._files, self._sizes, strict=True):
            end, own, reached = end + size, 0, Reached()
            for row in read_rows(file, splits_text=self._splits_text, reached=reached):
                made, length = self._make(file, row)
                # Rows of a compressed file are longer than what is read of it; a short file is read at once.
                own += length
                self._read = end - size + int(min(own, size * reached.share))
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
