"""Reads the values of JSON text: a list, one value on each line, or values one after another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson

from patch.errors import DataError

LONGEST_ROW = 1 << 28
NOT_UTF8 = "which is not UTF-8; convert it: iconv -f ENCODING -t UTF-8 FILE > NEW"
_PIECE_BYTES = 1 << 17
_BLANKS = " \t\r\n"
_BLANK = f"[{_BLANKS}]*"
_BETWEEN = re.compile(_BLANK)
_JOINED = (_BETWEEN, _BETWEEN)
"""What stands before a value, and what at the end of the text: where values follow each other."""
_LIST_BEGINS = (re.compile(rf"{_BLANK}\[{_BLANK}"), re.compile(rf"{_BLANK}\[{_BLANK}\]{_BLANK}"))
_LIST_GOES_ON = (re.compile(rf"{_BLANK}(?:,|\]{_BLANK}\[){_BLANK}"), re.compile(rf"{_BLANK}\]{_BLANK}"))
"""The same in a list, or several one after another."""
_Signs = tuple[re.Pattern[str], re.Pattern[str]]
_LONGEST_SIGN = 16
"""More than the characters of an escape or a word: a mistake nearer to the end may be one of a cut text."""


def json_rows(path: Path, stream: BufferedReader) -> Iterator[tuple[str, Any]]:
    """Place and value of each row; memory holds one row.

    Args:
        path: the file, for messages.
        stream: its text in UTF-8.

    Raises:
        DataError: malformed JSON, or a row over 256 MiB.
    """
    head = stream.peek().lstrip(_BLANKS.encode())
    if head[:1] == b"[":
        values = _Text(path, stream).values(_LIST_BEGINS, _LIST_GOES_ON)
        yield from ((f"row {number}", value) for number, (_, value) in enumerate(values, start=1))
    elif head[:1] in (b"{", b""):
        for line, value in _lines(path, stream) if b"\n" in head else _Text(path, stream).values():
            yield f"line {line}", value
    else:
        raise DataError(
            f"{path}: begins with {_excerpt(head)}, expected JSON, which begins with [ or {{, "
            "parquet or Arrow; or CSV in a file whose name ends in .csv or .tsv"
        )


def _lines(path: Path, stream: BufferedReader) -> Iterator[tuple[int, Any]]:
    """One value on each line; from the first line that is none on, values one after another."""
    for number, line in enumerate(iter(partial(stream.readline, LONGEST_ROW + 1), b""), start=1):
        if len(line) > LONGEST_ROW:
            raise _too_long(path, number)
        if line.isspace():
            continue
        try:
            value = orjson.loads(line)
        except orjson.JSONDecodeError:
            yield from _Text(path, stream, line, number).values()
            return
        yield number, value


class _Text:
    """JSON text of which only the value that is read is held.

    Python's scanner finds where a value ends, and orjson says what it is. The text is held as Latin-1, with a
    character for each byte: the signs of JSON are ASCII, and orjson checks that the rest is UTF-8.

    Args:
        path: the file, for messages.
        stream: what follows `begun`.
        begun: the beginning of the text.
        line: where it stands in the file.
    """

    def __init__(self, path: Path, stream: BufferedReader, begun: bytes = b"", line: int = 1) -> None:
        self._path, self._stream, self._line = path, stream, line
        self._text, self._begin = begun.decode("latin-1"), 0
        self._scan = json.JSONDecoder(parse_int=len).raw_decode  # int refuses 4,300 digits

    def values(self, first: _Signs = _JOINED, following: _Signs = _JOINED) -> Iterator[tuple[int, Any]]:
        """Line and value of each.

        Args:
            first: what stands before the first value, or at the end if there is none.
            following: what stands before each other one, or at the end.
        """
        signs = first
        while (found := self._next(*signs)) is not None:
            start, end = found
            self._line += self._text.count("\n", self._begin, start)
            yield self._line, _parse(self._path, self._text[start:end].encode("latin-1"), self._line)
            self._line += self._text.count("\n", start, end)
            self._begin, signs = end, following

    def _next(self, before: re.Pattern[str], at_end: re.Pattern[str]) -> tuple[int, int] | None:
        """Where the next value begins and ends; None at the end of the text."""
        while True:
            separator, blank = (each.match(self._text, self._begin) for each in (before, _BETWEEN))
            assert blank is not None, "it may be empty"
            start, error = (separator or blank).end(), None
            try:
                if separator:
                    return start, self._scan(self._text, start)[1]
            except json.JSONDecodeError as mistake:
                error = mistake
            except RecursionError:
                raise _malformed(self._path, self._line, self._line, "too many brackets") from None
            if self._may_go_on(start, error, _LONGEST_SIGN) and self._read():
                continue
            if at_end.fullmatch(self._text, self._begin):
                return None
            if error is not None and error.pos == start and at_end is not _BETWEEN:
                error = None  # no value begins here
            raise self._fault(start, error)

    def _may_go_on(self, start: int, error: json.JSONDecodeError | None, margin: int) -> bool:
        """Whether more text may mend what the scanner refuses: it ends too early, or in a word."""
        if error is None:
            return not self._text[start:].strip(_BLANKS + "]")
        return error.msg.startswith("Unterminated") or error.pos + margin >= len(self._text.rstrip(_BLANKS))

    def _read(self) -> bool:
        """Read on, as much as is held, so that a long value is not scanned often; False at the end."""
        held = len(self._text) - self._begin
        if held > LONGEST_ROW:
            raise _too_long(self._path, self._line)
        piece = self._stream.read(min(max(_PIECE_BYTES, held), LONGEST_ROW + _PIECE_BYTES - held))
        if piece:
            self._text, self._begin = self._text[self._begin :] + piece.decode("latin-1"), 0
        return bool(piece)

    def _fault(self, start: int, error: json.JSONDecodeError | None) -> DataError:
        """What is wrong where neither a value nor the end of the text comes.

        Args:
            start: where the value begins.
            error: what the scanner says of it; None: there is neither a value nor a comma of a list.
        """
        begin = self._line + self._text.count("\n", self._begin, start)
        if error is None:
            rest = self._text[start:].encode("latin-1")
            found = _excerpt(rest) if rest else "the end of the file inside the list"
            return DataError(
                f"{self._path}: line {begin}: malformed JSON: got {found}, expected a comma between two "
                "rows and ] after the last one"
            )
        if self._may_go_on(start, error, 0):
            return _malformed(self._path, begin, begin, "unexpected end of data; is the file cut off?")
        line = begin + self._text.count("\n", start, error.pos)
        found = _excerpt(self._text[error.pos :].encode("latin-1"))
        return _malformed(self._path, begin, line, f"{error.msg}, got {found}")


def _parse(path: Path, data: bytes, line: int) -> Any:
    """The value of a text that begins at this line."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        found, before = error.doc[error.pos :][:20], error.lineno - 1
        word = next((word for word in ("NaN", "Infinity") if found.startswith(word)), None)
        what = f"got {word}, which is no JSON value; expected a number or null"
        if word is None:
            what = f"{error.msg}, got {found!r}"
        try:
            data.decode()
        except UnicodeDecodeError as undecodable:  # orjson reports each at the first character
            before = data.count(b"\n", 0, undecodable.start)
            what = f"got {data[undecodable.start : undecodable.end]!r}, {NOT_UTF8}"
        raise _malformed(path, line, line + before, what) from error


def _malformed(path: Path, begin: int, line: int, what: str) -> DataError:
    within = "" if line == begin else f" (in the text that begins at line {begin})"
    return DataError(f"{path}: line {line}: malformed JSON{within}: {what}")


def _too_long(path: Path, line: int) -> DataError:
    return DataError(
        f"{path}: line {line}: has more than {LONGEST_ROW} bytes, expected one JSON object; is it a text "
        "file?"
    )


def _excerpt(text: bytes) -> str:
    return repr(text[:20].decode(errors="replace"))
