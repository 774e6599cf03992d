"""Cuts a stream of JSON text into its outermost values, by counting brackets outside of strings.

Nothing is parsed here. If the text is valid JSON, the cuts are exact. If it is not, some piece is not,
because together the pieces are the whole text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np


class Value(NamedTuple):
    """An object or a list, and the text before it."""

    between: bytes
    """The text since the last value."""
    text: bytes
    """From the opening to the closing bracket; empty at the end."""


def outermost_values(pieces: Iterable[bytes], level: int, longest: int) -> Iterator[Value]:
    """Every value inside of `level` brackets, and last the remaining text as `between`.

    The text also ends, and the remaining text is what was read, at a zero byte, at a closing bracket that was
    never opened, and where neither a value nor the text between two is complete after `longest` bytes.

    Args:
        pieces: JSON text in UTF-8; small pieces are scanned fastest.
        level: 1 for the elements of a list, 0 for values that follow each other.
        longest: the number of bytes that are held at most, apart from one piece.
    """
    pending = bytearray()
    scanner = _Scanner(level)
    for piece in pieces:
        pending += piece
        done = 0
        for start, end in scanner.scan(pending):
            yield Value(bytes(pending[done:start]), bytes(pending[start:end]))
            done = end
        del pending[:done]
        scanner.forget(done)
        if b"\0" in piece or scanner.is_unbalanced or len(pending) > longest:
            break
    yield Value(bytes(pending), b"")


class _Scanner:
    """Where values begin and end in a buffer that grows at its end and is cut at its beginning."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._scanned = 0
        """Bytes of the buffer that have been scanned; what follows is taken from here on."""
        self._depth = 0
        self._in_string = 0
        self._start = -1
        """Where the value that has begun starts; -1 between values."""
        self.is_unbalanced = False
        """Whether a bracket was closed that was never opened."""

    def forget(self, count: int) -> None:
        """Count positions from `count` on, because the bytes before were removed."""
        self._scanned -= count
        self._start = max(self._start - count, -1)

    def scan(self, buffer: bytearray) -> list[tuple[int, int]]:
        """The values that end in the bytes which are new since the last call."""
        text = bytes(buffer[self._scanned :])
        # The last escape may continue in the next piece. In the rest, a backslash is before what it escapes.
        if (len(text) - len(text.rstrip(b"\\"))) % 2:
            text = text[:-1]
        text = text.replace(b"\\\\", b"__")
        positions, depths, opens = self._brackets(text)
        starts = positions[opens & (depths == self._level + 1)] + self._scanned
        ends = positions[~opens & (depths == self._level)] + self._scanned + 1
        self._scanned += len(text)
        self.is_unbalanced |= bool((depths < 0).any())
        begun = ([self._start] if self._start >= 0 else []) + starts.tolist()
        self._start = begun[-1] if len(begun) > len(ends) else -1
        return list(zip(begun, ends.tolist(), strict=False))

    def _brackets(self, text: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The brackets outside of strings: position, the depth behind each, and whether it opens."""
        codes = np.frombuffer(text, np.uint8)
        quotes = np.flatnonzero(codes == ord('"'))
        quotes = quotes[codes[quotes - 1] != ord("\\")]  # a text never ends with a backslash
        kinds = codes & 0xDF  # [ and { become one code, ] and } another
        positions = np.flatnonzero((kinds == ord("[")) | (kinds == ord("]")))
        outside = (np.searchsorted(quotes, positions) + self._in_string) % 2 == 0
        positions = positions[outside]
        opens = kinds[positions] == ord("[")
        depths = self._depth + np.cumsum(np.where(opens, 1, -1))
        self._in_string = (self._in_string + len(quotes)) % 2
        if len(depths):
            self._depth = int(depths[-1])
        return positions, depths, opens
