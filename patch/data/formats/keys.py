"""Keys of a row: the user's names for them, the keys that a row has, and messages about missing keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import Any

import orjson

from patch.config.data_spec import COLUMNS_OF_TURNS
from patch.errors import DataError, nearest

_KEYS_SHOWN = 50
MISSPELLED = 0.75
"""Least similarity of a misspelled key, such as `ouput`, to the right key."""
_ABSENT: tuple[Any, ...] = (None, "", [], {})


def missing_keys(row: Mapping[str, Any], expected: str, known: Sequence[str]) -> str:
    """Return a message with the row's keys, the expected keys, and the known keys nearest to unknown keys."""
    keys = list(islice(row, _KEYS_SHOWN))
    unknown = [(key, nearest(key, list(known), MISSPELLED)) for key in keys if key not in known]
    hints = [f"; {key:.60}{hint}" for key, hint in unknown if hint]
    found = ", ".join(f"{key:.60}" for key in keys) + (", ..." if len(row) > len(keys) else "")
    return f"found the keys {found or 'none'}; expected {expected}{''.join(hints)}"


def is_absent(value: Any) -> bool:
    """Return whether a value is null or empty. Parquet and many JSON writers give each row all keys."""
    return not value and value in _ABSENT


def first_key(row: Mapping[str, Any], names: Sequence[str]) -> str | None:
    """Return the first of `names` with a value in the row, else the first that is a key, or None."""
    first = None
    for name in names:
        if name in row:
            if not is_absent(row[name]):
                return name
            first = first or name
    return first


def present(row: Mapping[str, Any], names: Set[str]) -> list[str]:
    """Return the keys under which the row has a value, sorted."""
    return sorted(name for name in row.keys() & names if not is_absent(row[name]))


def rename(row: Mapping[str, Any], columns: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the row with our names in place of the user's. `columns` maps our names to the row's names.

    Raises:
        DataError: the row lacks one of the columns.
    """
    if not columns:
        return dict(row)
    for ours, theirs in columns.items():
        if theirs not in row:
            hint = nearest(theirs, list(islice(row, _KEYS_SHOWN)))
            found = missing_keys(row, f"the key {theirs:.60} (null if it has none){hint}", [])
            raise DataError(f"{where}: --columns {ours}={theirs}: {found}")
    replaced = set(columns.values())
    kept = {key: value for key, value in row.items() if key not in replaced}
    return kept | {ours: row[theirs] for ours, theirs in columns.items()}


def columns_in(row: Mapping[str, Any], columns: Mapping[str, str]) -> frozenset[str]:
    """Return the user's columns (our names) that a row has. Role and content are searched in its turns."""
    found = {ours for ours, theirs in columns.items() if theirs in row and ours not in COLUMNS_OF_TURNS}
    of_turns = [ours for ours in columns if ours in COLUMNS_OF_TURNS]
    lists = (parse_json_text(value) for value in row.values()) if of_turns else ()
    turns = [turn for items in lists if isinstance(items, list) for turn in items if isinstance(turn, dict)]
    return frozenset(found | {ours for ours in of_turns if any(columns[ours] in turn for turn in turns)})


def text_of(row: Mapping[str, Any], key: str, where: str) -> str:
    """Return the text under a key that the row has.

    Raises:
        DataError: the value is null, a number or anything else.
    """
    if not isinstance(row[key], str):
        cure = 'where nothing is said: "", or leave the row out' if row[key] is None else "write it as a text"
        raise DataError(f"{where}: {key}: got {quoted(row[key])}, expected text ({cure})")
    return row[key]


def quoted(value: Any) -> str:
    """Return a value as JSON has it, for messages. A long value is truncated."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else f"{value!r:.60}"


def parse_json_text(value: Any) -> Any:
    """Return the value of a text that is JSON, or any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
