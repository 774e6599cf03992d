"""Reads the values of JSON text: a list, one value on each line, or values one after another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from io import BufferedReader
from itertools import chain
from pathlib import Path
from typing import Any

import orjson

from patch.data.readers.brackets import outermost_values
from patch.data.readers.streams import NOT_UTF8
from patch.errors import DataError

LONGEST_ROW = 1 << 28
_PIECE_BYTES = 1 << 17
"""Bytes that are cut into values at once; more do not fit into a core's cache."""
_BLANKS = b" \t\r\n"
_FILE_ENDS = "is the file cut off?"
_LINE_ENDS = "the line ends before its object does, and the lines below do not complete it"


def json_rows(path: Path, stream: BufferedReader) -> Iterator[tuple[str, Any]]:
    """Place and value of each row; memory holds one row.

    Args:
        path: the file, for messages.
        stream: its text in UTF-8.

    Raises:
        DataError: malformed JSON, or a row over 256 MiB.
    """
    head = stream.peek().lstrip(_BLANKS)
    if head[:1] == b"[":
        yield from _list_rows(path, stream)
    elif head[:1] not in (b"{", b""):
        raise DataError(
            f"{path}: begins with {_excerpt(head)}, expected JSON, which begins with [ or {{, "
            "parquet or Arrow; or CSV in a file whose name ends in .csv or .tsv"
        )
    elif _begins_with_a_line(head):
        yield from _line_rows(path, stream)
    else:
        yield from _joined_rows(path, _pieces(stream), 1)


def _begins_with_a_line(head: bytes) -> bool:
    first, end, _ = head.partition(b"\n")
    try:
        return bool(end and orjson.loads(first))
    except orjson.JSONDecodeError:
        return False


def _pieces(stream: BufferedReader) -> Iterator[bytes]:
    while piece := stream.read(_PIECE_BYTES):
        yield piece


def _line_rows(path: Path, stream: BufferedReader) -> Iterator[tuple[str, Any]]:
    """One value on each line; from the first line that is none on, values one after another."""
    number = 0
    while line := stream.readline(LONGEST_ROW + 1):
        number += 1
        if line.isspace():
            continue
        if len(line) > LONGEST_ROW:
            raise _too_long(path, number)
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            end = _LINE_ENDS if stream.peek().strip(_BLANKS) else _FILE_ENDS
            cut = (line[start : start + _PIECE_BYTES] for start in range(0, len(line), _PIECE_BYTES))
            joined = _joined_rows(path, chain(cut, _pieces(stream)), number)
            try:
                yield next(joined)
            except DataError:
                raise _malformed(path, line, number, error, end) from error
            yield from joined
            return
        yield f"line {number}", value


def _joined_rows(path: Path, pieces: Iterable[bytes], line: int) -> Iterator[tuple[str, Any]]:
    """Values one after another, over any number of lines; the first piece begins with this line."""
    for between, value in outermost_values(pieces, 0, LONGEST_ROW):
        if between.strip():
            _refuse_unreadable(path, between, line)
            yield f"line {line}", _parse(path, between, line)
        line += between.count(b"\n")
        if value:
            yield f"line {line}", _parse(path, value, line)
            line += value.count(b"\n")


def _list_rows(path: Path, stream: BufferedReader) -> Iterator[tuple[str, Any]]:
    """The values of a list, or of several lists one after another, as joined files have them."""
    number, line = 1, 1
    for between, value in outermost_values(_pieces(stream), 1, LONGEST_ROW):
        signs = between.translate(None, _BLANKS)
        if value:
            is_good = signs == b"[" if number == 1 else signs in (b",", b"][")
        else:
            is_good = signs == b"]" or (signs == b"[]" and number == 1)
        if not is_good:
            yield from _stray_rows(path, between, number, line, is_end=not value)
        line += between.count(b"\n")
        if value:
            yield f"row {number}", _parse(path, value, line)
            line += value.count(b"\n")
            number += 1


def _stray_rows(
    path: Path, text: bytes, number: int, line: int, *, is_end: bool
) -> Iterator[tuple[str, Any]]:
    """The numbers, strings and words that stand where a list has a comma or ends; or why it is malformed.

    Args:
        path: the file, for messages.
        text: what stands there.
        number: of the next row.
        line: where the text begins.
        is_end: whether the file ends behind the text.
    """
    _refuse_unreadable(path, text, line)
    body = text.lstrip(_BLANKS + b"[,")
    first_line = line + text.count(b"\n", 0, len(text) - len(body))
    if body[:1] in (b"{", b"["):
        _parse(path, body, first_line)  # it has no end, so it cannot be parsed
    elif body[:1] not in (b"]", b""):
        values = _parse(path, b"[" + body.rstrip(_BLANKS + b"],") + b"]", first_line)
        yield from ((f"row {number + index}", value) for index, value in enumerate(values))
        return
    found = "the end of the file inside the list" if is_end and not body else _excerpt(text)
    raise DataError(
        f"{path}: line {first_line}: malformed JSON: got {found}, expected a comma between two rows and ] "
        "after the last one"
    )


def _excerpt(text: bytes) -> str:
    return repr(text.strip()[:20].decode(errors="replace")) if text.strip() else "nothing"


def _refuse_unreadable(path: Path, text: bytes, line: int) -> None:
    """Refuse text in which no value ends, if that is because of a zero byte or of its length."""
    if (place := text.find(b"\0")) >= 0:
        line += text.count(b"\n", 0, place)
        raise DataError(f"{path}: line {line}: malformed JSON: a zero byte; is it a text file?")
    if len(text) > LONGEST_ROW:
        raise _too_long(path, line)


def _too_long(path: Path, line: int) -> DataError:
    return DataError(
        f"{path}: line {line}: has more than {LONGEST_ROW} bytes, expected one JSON object; is it a text "
        "file?"
    )


def _parse(path: Path, data: bytes, first_line: int) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _malformed(path, data, first_line, error) from error


def _malformed(
    path: Path, data: bytes, first_line: int, error: orjson.JSONDecodeError, end: str = _FILE_ENDS
) -> DataError:
    """What is wrong with a text that orjson refuses, and where.

    Args:
        path: the file.
        data: the text.
        first_line: where it begins.
        error: what orjson says.
        end: what is said if the text ends too early. The place is then where it begins, because its end says
            nothing about where the mistake is.
    """
    found = error.doc[error.pos : error.pos + 20]
    is_short = not found.strip()
    line = first_line + (0 if is_short else error.lineno - 1)
    what = f"{error.msg}; {end}" if is_short else f"{error.msg}, got {found!r}"
    if word := next((word for word in ("NaN", "Infinity") if found.startswith(word)), None):
        what = f"got {word}, which is no JSON value; expected a number or null"
    try:
        data.decode()
    except UnicodeDecodeError as undecodable:
        # orjson reports every encoding error at the first character, so find the line here.
        line = first_line + data.count(b"\n", 0, undecodable.start)
        got = data[undecodable.start : undecodable.end]
        what = f"got {got!r}, {NOT_UTF8}"
    begin = "" if line == first_line else f" (in the text that begins at line {first_line})"
    return DataError(f"{path}: line {line}: malformed JSON{begin}: {what}")
