"""Reads the rows of a JSON file: one list of objects, or one object on each line (JSONL).

The file's content decides which of the two it is, not its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from patch.errors import DataError

_BOM = b"\xef\xbb\xbf"
_LONGEST_LINE = 1 << 28
_PIECE_BYTES = 1 << 20


class Row(NamedTuple):
    """One object of the file."""

    place: str
    """Its position, for messages: "line 7" of JSONL, "row 7" of a list; counted from 1."""
    value: dict[str, Any]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSON list or of a JSONL file. A list is loaded into memory, JSONL is read line by line.

    A UTF-8 byte-order mark and blank lines are skipped.

    Raises:
        DataError: the file cannot be read, has malformed JSON (the message names the line), a line over
            256 MiB, a row that is not an object, or no rows; or there is not enough memory for a list.
    """
    empty = True
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise DataError(f"{path}: is a pipe or a device, expected a JSON or JSONL file")
    try:
        with path.open("rb") as file:
            for row in _list_rows(path, file) if _holds_list(file) else _line_rows(path, file):
                empty = False
                yield row
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; expected a JSON or JSONL file") from error
    except MemoryError as error:
        raise DataError(
            f"{path}: there is not enough memory to load this JSON list as a whole; use JSONL, one object on "
            "each line, which is read line by line"
        ) from error
    if empty:
        raise DataError(f"{path}: has no rows, expected at least one JSON object")


def _holds_list(file: BinaryIO) -> bool:
    head = file.read(4096).removeprefix(_BOM).lstrip()
    file.seek(0)
    return head.startswith(b"[")


def _list_rows(path: Path, file: BinaryIO) -> Iterator[Row]:
    _refuse_binary(path, file)
    for number, value in enumerate(_parse(path, file.read().removeprefix(_BOM), 1), start=1):
        yield _row(path, f"row {number}", value)


def _line_rows(path: Path, file: BinaryIO) -> Iterator[Row]:
    for number in count(1):
        line = file.readline(_LONGEST_LINE + 1)
        if not line:
            return
        if len(line) > _LONGEST_LINE:
            raise DataError(
                f"{path}: line {number}: has more than {_LONGEST_LINE} bytes, expected one JSON object; "
                "is it a text file?"
            )
        line = (line.removeprefix(_BOM) if number == 1 else line).strip()
        if line:
            yield _row(path, f"line {number}", _parse(path, line, number))


def _refuse_binary(path: Path, file: BinaryIO) -> None:
    """Refuse a file with a zero byte before it is read into memory: it is no JSON, perhaps a sparse file."""
    line = 1
    while piece := file.read(_PIECE_BYTES):
        if (place := piece.find(b"\0")) >= 0:
            line += piece.count(b"\n", 0, place)
            raise DataError(f"{path}: line {line}: malformed JSON: a zero byte; is it a text file?")
        line += piece.count(b"\n")
    file.seek(0)


def _row(path: Path, place: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{path}: {place}: got {_json_type(value)}, expected an object")
    return Row(place, value)


def _parse(path: Path, data: bytes, first_line: int) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        message, line = error.msg, first_line + error.lineno - 1
        try:
            data.decode()
        except UnicodeDecodeError as undecodable:
            # orjson reports every encoding error at the first character, so find the line here.
            message, line = "not UTF-8", first_line + data.count(b"\n", 0, undecodable.start)
        raise DataError(
            f"{path}: line {line}: malformed JSON: {message}; expected a list of objects or one object a line"
        ) from error


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
