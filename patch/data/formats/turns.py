"""Turns of a conversation: OpenAI's messages, ShareGPT's from and value, and their variants.

A content may be a list of parts: see contents.py.

{"role": "assistant", "content": "...", "tool_calls": [...], "weight": 0}
{"from": "gpt", "value": "..."}
{"from": "function_call", "value": JSON text of a call}, {"from": "observation", "value": "..."}
{"human": "...", "assistant": "..."}        one object for several turns
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from patch.config.data_spec import COLUMNS_OF_TURNS, parse_columns
from patch.config.schema import DataConfig
from patch.data.formats.contents import MessageContent, read_calls, read_parts
from patch.data.formats.keys import (
    first_key,
    is_absent,
    missing_keys,
    parse_json_text,
    present,
    quoted,
    rename,
    text_of,
)
from patch.errors import DataError, nearest

Message = dict[str, Any]
"""One turn as chat templates take it: role, content, and optionally tool_calls, tool_call_id and name."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages of one row; a chat template writes them as one text."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    """Tools that the assistant may call, as chat templates take them."""
    learned: tuple[bool, ...]
    """Whether each message is trained. An assistant's message with False is context only."""
    where: str
    """File and row, for error messages."""
    is_answer: bool = False
    """Whether text between the trained messages is trained too, as in a pair of TRL."""


@dataclass(frozen=True, slots=True)
class Text:
    """A row that is one text. All of it is trained, and no chat template writes it."""

    text: str
    where: str
    prompt: str | None = None
    """Context before the text, which is then an answer; or None."""


PLAIN = DataConfig(train_data_path="", max_padding_length=1, data_workers=1)
"""Settings for rows with the usual keys, which one process reads; path and length are given beside them."""


_CALL = "function_call"
_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "bing", "bard", "model"), "assistant"),
    # "developer" is OpenAI's later word for "system"; hardly any template of LLaMA-like models knows it.
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "tool_response", "ipython"), "tool"),
    **dict.fromkeys((_CALL, "tool_call"), _CALL),
}
"""Names of speakers in files, and the chat templates' role for each."""
_ROLES_NAMED = "system, user, assistant, tool (or human, gpt, observation, function_call)"

_ROLE_KEYS = ("role", "from")
_CONTENT_KEYS = ("content", "value")
_EXPECTED = (
    "role and content (or from and value); where turns have other names: --columns role=speaker,content=text"
)
_REASONING = {"reasoning_content", "reasoning", "thinking"}
_KEPT = {*_REASONING, "name", "tool_call_id"}
"""Keys with a text that templates read beside role, content and tool_calls."""
_WEIGHTS = {"weight", "train", "loss", "loss_scale", "loss_weight"}
_NOT_SUPPORTED = {
    **dict.fromkeys(("images", "videos", "audios", "audio"), "only text can be trained"),
    **dict.fromkeys(("tools", "functions"), "they belong to the row, beside its messages"),
    "train_detail": "a message is learned as a whole or not at all (train)",
}


class Turn(NamedTuple):
    """One message, and whether it is trained."""

    message: Message
    learned: bool
    tools: Sequence[dict[str, Any]] = ()


def read_turns(value: Any, key: str, where: str, data: DataConfig) -> list[Turn]:
    """Return the turns of a list of messages, or of JSON text of it.

    Args:
        key: the row's key of the list, for messages.
        data: has the user's names for the role and the content of a message.
    Raises:
        DataError: it is not a list of messages; or a message has no role or content, an unknown role, or
            something other than text.
    """
    items = parse_json_text(value)
    if isinstance(items, list):
        items = [parse_json_text(item) for item in items]  # of the type Json in Hugging Face datasets
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise DataError(
            f"{where}: {key}: got {quoted(value)}, expected a list of objects with role and content, or JSON "
            "text of one"
        )
    turns = []
    columns = {ours: name for ours, name in parse_columns(data.columns).items() if ours in COLUMNS_OF_TURNS}
    for number, item in enumerate(items, start=1):
        place = f"{where}: message {number}"
        if columns:
            asked = {ours: theirs for ours, theirs in columns.items() if _has_column(item, ours, theirs)}
            item = rename(item, asked, place)
        turns += [_turn(each, place) for each in _spoken(item, place)]
    return turns


def _has_column(item: dict[str, Any], ours: str, theirs: str) -> bool:
    """Return whether a message has the user's column, or must have it because it lacks the usual keys."""
    usual = _ROLE_KEYS if ours == "role" else (*_CONTENT_KEYS, "tool_calls")
    return theirs in item or first_key(item, usual) is None


def _spoken(item: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Split an object into objects of one speaker each: {"human": ..., "assistant": ...} holds two."""
    if first_key(item, _ROLE_KEYS) is not None:
        return [item]
    said = {key: value for key, value in item.items() if not is_absent(value)}
    if said and all(key.lower() in _ROLES for key in said):
        return [{"role": role, "content": content} for role, content in said.items()]
    known = [*_ROLE_KEYS, *_CONTENT_KEYS]
    raise DataError(f"{where}: {missing_keys(item, _EXPECTED, known)}")


def _turn(item: dict[str, Any], where: str) -> Turn:
    for key in present(item, _NOT_SUPPORTED.keys()):
        raise DataError(f"{where}: key {key} is not supported: {_NOT_SUPPORTED[key]}")
    role = _role(item, where)
    content_key = first_key(item, _CONTENT_KEYS)
    if role == _CALL:
        role = "assistant"
        content = MessageContent(calls=read_calls(item.get(content_key or ""), f"{where}: {content_key}"))
    else:
        calls_key = first_key(item, ("tool_calls", "function_call"))
        calls = [] if calls_key is None else read_calls(item[calls_key], f"{where}: {calls_key}")
        content = _content(item, content_key, where, has_calls=bool(calls), is_result=role == "tool")
        content.calls = calls + content.calls
    kept = {key: text_of(item, key, where) for key in present(item, _KEPT)}
    if content.reasoning:
        kept["reasoning_content"] = kept.get("reasoning_content", "") + content.reasoning
    message: Message = {"role": role, "content": content.text, **kept}
    if content.calls:
        message["tool_calls"] = content.calls
    said = content.text + "".join(kept[key] for key in kept.keys() & _REASONING)
    is_learned = _has_weight(item, where) and role == "assistant" and bool(content.calls or said.strip())
    return Turn(message, is_learned, content.tools)


def _role(item: dict[str, Any], where: str) -> str:
    key = first_key(item, _ROLE_KEYS)
    assert key is not None, "_spoken lets nothing else pass"
    said = item[key]
    role = _ROLES.get(said.strip().lower()) if isinstance(said, str) else None
    if role is None:
        hint = nearest(said, list(_ROLES)) if isinstance(said, str) else ""
        raise DataError(f"{where}: {key}: got {quoted(said)}, expected one of {_ROLES_NAMED}{hint}")
    return role


def _content(
    item: dict[str, Any], key: str | None, where: str, *, has_calls: bool, is_result: bool
) -> MessageContent:
    """Return the content of a message, which may be null beside tool calls. A tool's result may be an object;
    templates want its JSON text."""
    if has_calls and (key is None or item[key] is None):
        return MessageContent()
    if key is None:
        known = [*_ROLE_KEYS, *_CONTENT_KEYS, "tool_calls"]
        raise DataError(f"{where}: {missing_keys(item, _EXPECTED, known)}")
    if is_result and isinstance(item[key], dict):
        return MessageContent(json.dumps(item[key], ensure_ascii=False))
    if isinstance(item[key], list):
        return read_parts(item[key], f"{where}: {key}")
    return MessageContent(text_of(item, key, where))


def _has_weight(item: dict[str, Any], where: str) -> bool:
    """Return whether no key of the message excludes it from the loss."""
    weights = {key: item[key] for key in item.keys() & _WEIGHTS if item[key] is not None}
    for key, value in weights.items():
        if value not in (0, 1):
            raise DataError(f"{where}: {key}: got {quoted(value)}, expected 0, 1, true or false")
    return all(weights.values())
