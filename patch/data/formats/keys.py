"""What is said about the keys of an object and about a value that is not text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from patch.errors import DataError, nearest

_KEYS_SHOWN = 50


def missing_keys(row: Mapping[str, Any], expected: str, known: Sequence[str]) -> str:
    """A message with the keys of a row, the expected ones, and for each unknown key the nearest known one.

    Args:
        row: the row that lacks a key.
        expected: the expected keys, in words.
        known: the keys among which the nearest one is searched.
    """
    keys = list(islice(row, _KEYS_SHOWN))
    hints = [f"; {key:.60}{hint}" for key in keys if key not in known and (hint := nearest(key, list(known)))]
    found = ", ".join(f"{key:.60}" for key in keys) + (", ..." if len(row) > len(keys) else "")
    return f"found the keys {found or 'none'}; expected {expected}{''.join(hints)}"


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """The text under a key that is there.

    Raises:
        DataError: it is null, a number or anything else.
    """
    if not isinstance(row[key], str):
        raise DataError(f"{where}: {key}: got {row[key]!r:.60}, expected text")
    return row[key]
