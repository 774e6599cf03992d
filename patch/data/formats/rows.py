"""Converts a row to a conversation: alpaca keys, Pai's names for them, and OpenAI messages.

    {"instruction": ..., "input": ..., "output": ..., "system": ...}     input and system may be absent
    {"query": ..., "response": ...}       query is instruction; response or content is output
    {"messages": [{"role": "system" | "user" | "assistant", "content": ...}, ...]}

Keys that would change the conversation's meaning and are not supported yet are refused; others are ignored.
"""

from __future__ import annotations

from typing import Any

from patch.data.formats.conversation import PLAIN, Conversation, FormatOptions, Message, Text
from patch.data.formats.keys import missing_keys, text_of
from patch.errors import DataError, nearest

_PROMPT_KEYS = ("instruction", "query")
_ANSWER_KEYS = ("output", "response", "content")
_ROLES = ("system", "user", "assistant")
_KNOWN_KEYS = [*_PROMPT_KEYS, *_ANSWER_KEYS, "input", "system", "messages"]
_EXPECTED = "instruction (or query) and output (or response, content), or messages"

_NOT_YET = ("conversations", "conversation", "history", "tools", "functions")
_NOT_YET_IN_MESSAGES = ("tool_calls", "function_call", "tool_call_id", "weight", "loss", "loss_scale")
_ABSENT: tuple = (None, "", [], {})


def to_conversation(row: dict[str, Any], where: str, options: FormatOptions = PLAIN) -> Conversation | Text:
    """The conversation of one row, in the form that chat templates take.

    Args:
        row: one object of the file.
        where: file and row, for error messages.
        options: what the user says about the rows.
    Raises:
        DataError: keys are missing (the message says what was found and expected, and the nearest key), are
            not text, or belong to a format that is not supported yet.
    """
    _refuse(row, _NOT_YET, where)
    if row.get("messages") is not None:
        messages = _from_messages(row["messages"], where)
    else:
        messages = _from_alpaca(row, where)
    learned = tuple(message["role"] == "assistant" for message in messages)
    return Conversation(messages, None, learned, where)


def _from_alpaca(row: dict[str, Any], where: str) -> list[Message]:
    prompt_key = next((key for key in _PROMPT_KEYS if key in row), None)
    answer_key = next((key for key in _ANSWER_KEYS if key in row), None)
    if prompt_key is None or answer_key is None:
        raise DataError(f"{where}: {missing_keys(row, _EXPECTED, _KNOWN_KEYS)}")
    prompt = text_of(row, prompt_key, where)
    if row.get("input") is not None and (extra := text_of(row, "input", where)).strip():
        prompt = f"{prompt}\n{extra}"
    messages = [{"role": "user", "content": prompt}]
    if row.get("system") is not None and (system := text_of(row, "system", where)).strip():
        messages.insert(0, {"role": "system", "content": system})
    return [*messages, {"role": "assistant", "content": text_of(row, answer_key, where)}]


def _from_messages(messages: Any, where: str) -> list[Message]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where}: messages: expected a list of objects with role and content")
    checked = []
    for number, message in enumerate(messages, start=1):
        place = f"{where}: message {number}"
        _refuse(message, _NOT_YET_IN_MESSAGES, place)
        if "role" not in message or "content" not in message:
            raise DataError(f"{place}: {missing_keys(message, 'role and content', ['role', 'content'])}")
        role = text_of(message, "role", place)
        if role not in _ROLES:
            raise DataError(
                f"{place}: role: got {role!r:.60}, expected {', '.join(_ROLES)}{nearest(role, list(_ROLES))}"
            )
        checked.append({"role": role, "content": text_of(message, "content", place)})
    opening = next((message["role"] for message in checked if message["role"] != "system"), "nobody")
    if opening != "user":
        raise DataError(f"{where}: messages: {opening} speaks first, expected the user")
    return checked


def _refuse(row: dict[str, Any], keys: tuple[str, ...], where: str) -> None:
    for key in keys:
        if row.get(key) not in _ABSENT:
            raise DataError(f"{where}: key {key} is not supported yet; expected {_EXPECTED}")
