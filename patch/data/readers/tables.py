"""Reads the rows of tables, a few at a time: CSV, TSV, parquet, Arrow; and the documents of plain text."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from patch.data.readers.json_rows import LONGEST_ROW, NOT_UTF8
from patch.errors import DataError

_DELIMITERS = ",\t;"
"""Delimiters of CSV, of TSV, and of CSV where the comma is the decimal sign."""

_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
KINDS = {_PARQUET: "parquet", _ARROW_FILE: "Arrow", _ARROW_STREAM: "Arrow"}
"""First bytes of binary tables. Hugging Face's `save_to_disk` writes streams."""

_ROWS_AT_ONCE = 128
"""Few, because compression hides how long the rows are."""
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


_Rows = Iterator[tuple[str, dict[str, str]]]


@dataclass
class ReadShare:
    """Share of a file that was read for the rows so far; 1 if unknown."""

    share: float = 1.0


def csv_rows(path: Path, stream: BufferedReader) -> _Rows:
    """Yield place and value of each row of a UTF-8 text. Memory holds one row. Every cell is a text.

    The first row names the columns. The delimiter is the comma, tab or semicolon that is most frequent in the
    first line. A quoted cell may hold delimiters and line feeds; a quotation mark is doubled there.

    Raises:
        DataError: the text is not UTF-8; a row has more or fewer cells than the first row; a quotation mark
            is not closed; a cell is over 256 MiB; or two columns have the same name.
    """
    csv.field_size_limit(LONGEST_ROW)
    lines = _lines(path, stream)
    first = next(lines, "")
    delimiter = max(_DELIMITERS, key=first.count)
    reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    line = 1
    try:
        names = next(reader)
        _check_names(path, names)
        line = reader.line_num + 1
        for cells in reader:
            if cells and len(cells) != len(names):
                raise DataError(
                    f"{path}: line {line}: got {len(cells)} cells, expected {len(names)} as in the first "
                    f"row; a cell that holds {delimiter!r}, quotes or line ends stands in quotation marks"
                )
            if cells:
                yield f"line {line}", dict(zip(names, cells, strict=True))
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}: line {line}: malformed CSV: {error}; is a quotation mark not doubled or not closed?"
        ) from error


def text_rows(path: Path, stream: BufferedReader, splits_text: bool) -> _Rows:
    """Yield place and text of each document: the whole file, or with `splits_text` lines between blank lines.

    Raises:
        DataError: the text is not UTF-8.
    """
    lines = enumerate(_lines(path, stream, "text"), start=1)
    for is_text, document in groupby(lines, lambda line: not splits_text or not line[1].isspace()):
        if is_text:
            numbers, texts = zip(*document, strict=True)
            text = "".join(texts)
            yield f"line {numbers[0]}", {"text": text.rstrip("\r\n") if splits_text else text}


def _lines(path: Path, stream: BufferedReader, kind: str = "CSV") -> Iterator[str]:
    number = 0
    while data := stream.readline(LONGEST_ROW):
        number += 1
        try:
            yield data.decode()
        except UnicodeDecodeError as error:
            got = data[error.start : error.end]
            raise DataError(f"{path}: line {number}: malformed {kind}: got {got!r}, {NOT_UTF8}") from error


def arrow_rows(path: Path, magic: bytes, reached: ReadShare) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and value of each row. Memory holds a few rows, and of parquet one page of each column.

    A null in a struct is an absent key, because all rows have the same keys. Dates, decimals and binary
    columns become Python's objects. `reached` is kept up to date if the file says how many rows it has.

    Raises:
        DataError: the file is damaged or ends early, or two columns have the same name.
        OSError: the file cannot be read.
    """
    number = 0
    try:
        for batch in _parquet_batches(path, reached) if magic == _PARQUET else _arrow_batches(path, magic):
            _check_names(path, batch.schema.names)
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", {key: _without_nulls(value) for key, value in row.items()}
    except (DataError, MemoryError):
        raise
    except Exception as error:  # noqa: BLE001 - pyarrow has many errors for damaged data, ValueError among them
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise DataError(
            f"{path}: its {KINDS[magic]} data is damaged or ends early after row {number} ({error!s:.300}); "
            "expected a whole file: copy or make it again"
        ) from error


def _parquet_batches(path: Path, reached: ReadShare) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile  # only parquet files need it

    # Threads would interfere with forked workers; the buffer replaces reading whole columns.
    with ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        for number, batch in enumerate(file.iter_batches(_ROWS_AT_ONCE, use_threads=False), start=1):
            reached.share = min(1.0, number * _ROWS_AT_ONCE / file.metadata.num_rows)
            yield batch


def _arrow_batches(path: Path, magic: bytes) -> Iterator[Any]:
    import pyarrow  # only these files need it

    # Mapped: a batch may be the whole file.
    with pyarrow.memory_map(str(path)) as file:
        if magic == _ARROW_FILE:
            reader = pyarrow.ipc.open_file(file)
            batches: Any = map(reader.get_batch, range(reader.num_record_batches))
        else:
            # pyarrow accepts a stream that is truncated between two batches.
            if file.read_at(len(_STREAM_END), max(0, file.size() - len(_STREAM_END))) != _STREAM_END:
                raise ValueError("the end of the stream is missing")
            batches = pyarrow.ipc.open_stream(file)
        for batch in batches:
            batch.validate(full=True)  # damaged offsets would lead anywhere in memory
            for start in range(0, batch.num_rows, _ROWS_AT_ONCE):
                yield batch.slice(start, _ROWS_AT_ONCE)


def _check_names(path: Path, names: list[str]) -> None:
    doubled = [name for name, count in Counter(names).items() if count > 1]
    if doubled:
        raise DataError(f"{path}: two columns are named {doubled[0]!r}, expected unique names; rename one")


def _without_nulls(value: Any) -> Any:
    """Drop null fields: a struct has every field that any row has."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
