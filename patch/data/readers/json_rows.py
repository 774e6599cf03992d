"""Reads the values of JSON text: one on each line (JSONL), or a text held whole in memory, such as a list."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from patch.errors import DataError

LONGEST_ROW = 1 << 28
LONGEST_TEXT = 1 << 32
"""Most bytes of a text that is not JSONL; memory holds it whole."""
NOT_UTF8 = "which is not UTF-8; convert it: iconv -f ENCODING -t UTF-8 FILE > NEW"
_PIECE_BYTES = 1 << 18
_BLANKS = " \t\r\n"
_BLANK = re.compile(f"[{_BLANKS}]*")


def json_rows(path: Path, stream: BufferedReader) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each row of a UTF-8 text. Memory holds one row of JSONL, or all of other JSON.

    Raises:
        DataError: malformed JSON, a line of JSONL over 256 MiB, or another text over 4 GiB.
    """
    head = stream.peek().lstrip(_BLANKS.encode())
    if head[:1] not in (b"[", b"{", b""):
        raise DataError(
            f"{path}: begins with {_excerpt(head)}, expected JSON, which begins with [ or {{, "
            "parquet or Arrow; or CSV in a file whose name ends in .csv or .tsv"
        )
    number, line = 1, b""
    if head[:1] != b"[":
        for number, line in enumerate(iter(partial(stream.readline, LONGEST_ROW + 1), b""), start=1):
            if len(line) > LONGEST_ROW:
                raise _too_long(path, number, LONGEST_ROW)
            if line.isspace():
                continue
            try:
                value = orjson.loads(line)
            except orjson.JSONDecodeError as error:
                if not error.msg.startswith(("unexpected end of data", "unexpected content after")):
                    _parse(path, line, number)  # raises: more text would not help
                break  # the rest is no JSONL
            yield f"line {number}", value
        else:
            return
    pieces = islice(iter(partial(stream.read, _PIECE_BYTES), b""), LONGEST_TEXT // _PIECE_BYTES)
    text = b"".join([line, *pieces])
    if stream.peek():
        raise _too_long(path, number, LONGEST_TEXT)
    yield from _values(path, text, number)


def _values(path: Path, text: bytes, line: int) -> Iterator[tuple[str, Any]]:
    """Yield place and value of each value in a text, or of each item of a list. The text begins at `line`."""
    found: Iterable[tuple[int, Any]]
    try:
        found = [(line, orjson.loads(text))]
    except orjson.JSONDecodeError:
        found = _joined(path, text.decode("latin-1"), line)
    number = 0
    for begin, value in found:
        is_list = isinstance(value, list)
        for row in value if is_list else [value]:
            number += 1
            yield f"row {number}" if is_list else f"line {begin}", row


def _joined(path: Path, text: str, line: int) -> Iterator[tuple[int, Any]]:
    """Yield line and value of each of several values. Python's scanner finds the end of a value; orjson reads
    it. `text` has a character per byte: JSON's signs are ASCII, and orjson checks that the rest is UTF-8."""
    scan, end = json.JSONDecoder(parse_int=len).raw_decode, 0  # int refuses 4,300 digits
    while (start := _BLANK.match(text, end).end()) < len(text):  # type: ignore[union-attr]  # it may be empty
        line += text.count("\n", end, start)
        try:
            _, end = scan(text, start)
        except RecursionError:
            raise _malformed(path, line, "too many brackets") from None
        except json.JSONDecodeError as error:
            if error.msg.startswith("Unterminated") or error.pos >= len(text.rstrip(_BLANKS)):
                raise _malformed(path, line, "unexpected end of data; is the file cut off?") from None
            what = f"{error.msg}, got {_excerpt(text[error.pos :][:20].encode('latin-1'))}"
            raise _malformed(path, line + text.count("\n", start, error.pos), what) from None
        yield line, _parse(path, text[start:end].encode("latin-1"), line)
        line += text.count("\n", start, end)


def _parse(path: Path, data: bytes, line: int) -> Any:
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
        except UnicodeDecodeError as undecodable:  # orjson reports it at the first character
            before = data.count(b"\n", 0, undecodable.start)
            what = f"got {data[undecodable.start : undecodable.end]!r}, {NOT_UTF8}"
        raise _malformed(path, line + before, what) from error


def _malformed(path: Path, line: int, what: str) -> DataError:
    return DataError(f"{path}: line {line}: malformed JSON: {what}")


def _too_long(path: Path, line: int, most: int) -> DataError:
    return DataError(
        f"{path}: line {line}: has more than {most} bytes, expected one JSON object on each line; is it "
        "text?"
    )


def _excerpt(text: bytes) -> str:
    return repr(text[:20].decode(errors="replace"))
