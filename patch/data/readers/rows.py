"""Reads the rows of one file: JSON, JSONL, CSV, all also compressed, parquet or Arrow.

The file's first bytes decide what it is. CSV has none of its own, so there the name counts too. Memory does
not grow with the file: it holds one row, or one batch of a parquet file's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from patch.data.readers.arrow_rows import arrow_rows, magic_of
from patch.data.readers.csv_rows import csv_rows
from patch.data.readers.json_rows import json_rows
from patch.data.readers.streams import DamagedDataError, open_stream
from patch.errors import DataError
from patch.storage.names import TABLES

_Places = Iterator[tuple[str, Any]]
_LIST_KEY = "data"


class Row(NamedTuple):
    """One object of the file."""

    place: str
    """Its position, for messages: "line 7" of JSONL or CSV, "row 7" of a list or parquet; counted from 1."""
    value: dict[str, Any]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file in their order.

    A file is a JSON list of objects, one JSON object on each line (JSONL), JSON objects one after another
    over any number of lines, one object with the list of them under `data`, CSV or TSV, any of these
    compressed by gzip or zstd; or parquet or Arrow. A UTF-8 byte-order mark and blank lines are skipped. In
    rows of a parquet or Arrow file, keys without a value (null) are absent.

    Raises:
        DataError: the file cannot be read, is damaged, of another kind or in another encoding, has malformed
            JSON (the message names the line), a row over 256 MiB, a row that is not an object, or no rows; or
            there is not enough memory for a row. The rows before the fault are given first.
    """
    empty = True
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: is a pipe or a device, expected a file of rows")
    try:
        for place, value in _without_wrapper(_places_and_values(path)):
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
    yield first
    yield from rows


def _places_and_values(path: Path) -> _Places:
    with path.open("rb") as file:
        magic = magic_of(file.read(8))
    if magic is not None:
        yield from arrow_rows(path, magic)
        return
    is_table = any(suffix.lower() in TABLES for suffix in path.suffixes[-2:])
    place = None
    try:
        with open_stream(path) as stream:
            is_json = stream.peek().lstrip()[:1] in (b"{", b"[")
            for place, value in (csv_rows if is_table and not is_json else json_rows)(path, stream):
                yield place, value
    except DamagedDataError as error:
        what, reason = error.args
        after = "in its first row" if place is None else f"after {place}"
        raise DataError(
            f"{path}: its {what} {after} ({reason}); expected a whole file: copy or make it again"
        ) from error


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
