"""Reads the rows of a file (JSON, JSONL, CSV, each also compressed, parquet or Arrow) or of a data set.

The first bytes of a file decide its kind. CSV has no such bytes, so its name counts too. Memory holds one
row or one batch of parquet rows; only a JSON list is held whole.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from patch.data.readers.json_rows import json_rows
from patch.data.readers.tables import KINDS, ReadShare, arrow_rows, csv_rows, text_rows
from patch.errors import DataError
from patch.storage.names import TABLES, TEXT
from patch.storage.places import open_to_read

_Places = Iterator[tuple[str, Any]]
Made = TypeVar("Made")
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
"""Files that users give by mistake: their first bytes, and their kind."""


class Row(NamedTuple):
    """One object of the file."""

    place: str
    """Position for messages: "line 7" of JSONL or CSV, "row 7" of a list or parquet; counted from 1."""
    value: dict[str, Any]


def read_rows(path: Path, *, splits_text: bool = False, reached: ReadShare | None = None) -> Iterator[Row]:
    """Yield the rows of a file in order: JSON, CSV, TSV, parquet, Arrow or plain text.

    JSON is a list of objects, one object on each line (JSONL), or objects one after another over any number
    of lines. JSON may also be one object with the list under `data`. JSON, CSV and TSV may be compressed by
    gzip or zstd. A UTF-8 byte-order mark and blank lines are skipped. In rows of parquet or Arrow, keys with
    a null value are absent. A .txt file that is not JSON is one row with the key `text`.

    Args:
        splits_text: each run of lines between blank lines of a .txt file is a row.
        reached: is kept up to date.
    Raises:
        DataError: the file cannot be read, is damaged, or is of another kind or encoding. Or it has malformed
            JSON (the message names the line), a row over 256 MiB, a row that is not an object, or no rows. Or
            a row needs more memory than there is. The rows before the fault are given first.
    """
    empty = True
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: is a pipe or a device, expected a file of rows")
    try:
        for place, value in _without_wrapper(_places_and_values(path, splits_text, reached or ReadShare())):
            if not isinstance(value, dict):
                raise DataError(f"{path}: {place}: got {_json_type(value)}, expected an object")
            empty = False
            yield Row(place, value)
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror or error}; expected a file of rows"
        ) from error
    except MemoryError as error:
        what = "a row does not fit into memory, expected rows that fit; free memory or split the row"
        raise DataError(f"{path}: {what}") from error
    if empty:
        raise DataError(f"{path}: has no rows, expected at least one JSON object")


def _without_wrapper(rows: _Places) -> _Places:
    """Yield the rows, or the list under the key `data` if the file is one object."""
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


def _places_and_values(path: Path, splits_text: bool, reached: ReadShare) -> _Places:
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
            # pyarrow's errors have only a text, such as "Truncated compressed stream".
            what = "ends early" if "Truncated" in str(error) else "is damaged"
            after = "in its first row" if place is None else f"after {place}"
            raise DataError(
                f"{path}: its {codec} data {what} {after} ({error}); expected a whole file: copy or make it "
                "again"
            ) from error


def _known(head: bytes, kinds: dict[bytes, str]) -> bytes | None:
    return next((magic for magic in kinds if head.startswith(magic)), None)


def _opened(path: Path, file: Any, codec: str | None) -> io.BufferedReader:
    """Open the decompressed text of a file after its byte-order mark. Refuse anything but UTF-8 text."""
    if codec is not None:
        import pyarrow  # only tables and compressed files need it

        # pyarrow refuses data that ends early, and zstd windows over 128 MiB.
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
    """Reader of the rows of files in batches, which knows how much of the files has been read.

    Args:
        make: maps a file and a row to a result and its size: for plain JSON, about the bytes that were read.
        most_rows: most rows of a batch.
        most_bytes: a batch ends with the row that reaches this size.
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

    @property
    def share(self) -> float:
        """Estimated share of all bytes that was read."""
        return self._read / max(1, sum(self._sizes))

    def batches(self) -> Iterator[list[Made]]:
        """Yield the results for all rows, in order."""
        batch: list[Made] = []
        num_bytes = end = 0
        for file, size in zip(self._files, self._sizes, strict=True):
            end, own, reached = end + size, 0, ReadShare()
            for row in read_rows(file, splits_text=self._splits_text, reached=reached):
                made, length = self._make(file, row)
                # Rows of a compressed file are longer than the bytes read; a short file is read at once.
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
