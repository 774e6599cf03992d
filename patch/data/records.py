"""Rows of a JSON file: one list of objects, or one object a line; told apart by content, not by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from patch.errors import DataError

_BOM = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """One object of the file."""

    place: str
    """Where it is, for messages: "line 7" of JSONL, "row 7" of a list; counted from 1."""
    value: dict[str, Any]


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSON list or of a JSONL file; the latter is never held in memory as a whole.

    A UTF-8 byte-order mark and blank lines are skipped.

    Raises:
        DataError: unreadable file, malformed JSON (file and line), a row that is no object, no rows at all.
    """
    empty = True
    try:
        with path.open("rb") as file:
            for row in _list_rows(path, file) if _holds_list(file) else _line_rows(path, file):
                empty = False
                yield row
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}; expected a JSON or JSONL file") from error
    if empty:
        raise DataError(f"{path}: holds no rows, expected at least one JSON object")


def _holds_list(file: BinaryIO) -> bool:
    head = file.read(4096).removeprefix(_BOM).lstrip()
    file.seek(0)
    return head.startswith(b"[")


def _list_rows(path: Path, file: BinaryIO) -> Iterator[Row]:
    for number, value in enumerate(_parse(path, file.read().removeprefix(_BOM), 1), start=1):
        yield _row(path, f"row {number}", value)


def _line_rows(path: Path, file: BinaryIO) -> Iterator[Row]:
    for number, line in enumerate(file, start=1):
        line = (line.removeprefix(_BOM) if number == 1 else line).strip()
        if line:
            yield _row(path, f"line {number}", _parse(path, line, number))


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
            # orjson places every encoding error at the file's first character.
            message, line = "not UTF-8", first_line + data.count(b"\n", 0, undecodable.start)
        raise DataError(
            f"{path}: line {line}: malformed JSON: {message}; expected a list of objects or one object a line"
        ) from error


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
