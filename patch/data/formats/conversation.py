"""Converts a row to a conversation: alpaca keys, Pai's names for them, and OpenAI messages.

    {"instruction": ..., "input": ..., "output": ..., "system": ...}     input and system may be absent
    {"query": ..., "response": ...}       query is instruction; response or content is output
    {"messages": [{"role": "system" | "user" | "assistant", "content": ...}, ...]}

Keys that would change the conversation's meaning and are not supported yet are refused; others are ignored.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

from patch.errors import DataError, nearest

Message = dict[str, str]

_PROMPT_KEYS = ("instruction", "query")
_ANSWER_KEYS = ("output", "response", "content")
_ROLES = ("system", "user", "assistant")
_KNOWN_KEYS = [*_PROMPT_KEYS, *_ANSWER_KEYS, "input", "system", "messages"]
_EXPECTED = "instruction (or query) and output (or response, content), or messages"

_KEYS_SHOWN = 50

_NOT_YET = ("conversations", "conversation", "history", "tools", "functions")
_NOT_YET_IN_MESSAGES = ("tool_calls", "function_call", "tool_call_id", "weight", "loss", "loss_scale")
_ABSENT: tuple = (None, "", [], {})


def to_messages(row: dict[str, Any], where: str) -> list[Message]:
    """The conversation of one row, in the form that chat templates take.

    An alpaca input is joined to its instruction by a newline.

    Args:
        row: one object of the file.
        where: file and row, for error messages.
    Raises:
        DataError: keys are missing (the message says what was found and expected, and the nearest key), are
            not text, or belong to a format that is not supported yet.
    """
    _refuse(row, _NOT_YET, where)
    if row.get("messages") is not None:
        return _from_messages(row["messages"], where)
    return _from_alpaca(row, where)


def _from_alpaca(row: dict[str, Any], where: str) -> list[Message]:
    prompt_key = next((key for key in _PROMPT_KEYS if key in row), None)
    answer_key = next((key for key in _ANSWER_KEYS if key in row), None)
    if prompt_key is None or answer_key is None:
        raise DataError(f"{where}: {missing_keys(row, _EXPECTED, _KNOWN_KEYS)}")
    prompt = _text(row, prompt_key, where)
    if row.get("input") is not None and (extra := _text(row, "input", where)).strip():
        prompt = f"{prompt}\n{extra}"
    messages = [{"role": "user", "content": prompt}]
    if row.get("system") is not None and (system := _text(row, "system", where)).strip():
        messages.insert(0, {"role": "system", "content": system})
    return [*messages, {"role": "assistant", "content": _text(row, answer_key, where)}]


def _from_messages(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where}: messages: expected a list of objects with role and content")
    checked = []
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        _refuse(message, _NOT_YET_IN_MESSAGES, place)
        if "role" not in message or "content" not in message:
            raise DataError(f"{place}: {missing_keys(message, 'role and content', ['role', 'content'])}")
        role = _text(message, "role", place)
        if role not in _ROLES:
            raise DataError(
                f"{place}: role: got {role!r:.60}, expected {', '.join(_ROLES)}{nearest(role, list(_ROLES))}"
            )
        checked.append({"role": role, "content": _text(message, "content", place)})
    opening = next((message["role"] for message in checked if message["role"] != "system"), "nobody")
    if opening != "user":
        raise DataError(f"{where}: messages: {opening} speaks first, expected the user")
    return checked


def missing_keys(row: dict[str, Any], expected: str, known: list[str]) -> str:
    """A message with the keys of a row, the expected ones, and for each unknown key the nearest known one.

    Args:
        row: the row that lacks a key.
        expected: the expected keys, in words.
        known: the keys among which the nearest one is searched.
    """
    keys = list(islice(row, _KEYS_SHOWN))
    hints = [f"; {key}{hint}" for key in keys if key not in known and (hint := nearest(key, known))]
    found = ", ".join(f"{key:.60}" for key in keys) + (", ..." if len(row) > len(keys) else "")
    return f"found the keys {found or 'none'}; expected {expected}{''.join(hints)}"


def _refuse(row: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        if row.get(key) not in _ABSENT:
            raise DataError(f"{where}: key {key} is not supported yet; expected {_EXPECTED}")


def _text(row: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(row[key], str):
        raise DataError(f"{where}: {key}: got {row[key]!r:.60}, expected text")
    return row[key]
