"""Content of a message: text, parts of several kinds, tool calls; and the tools of a row.

A content may be a list of parts, in the form of OpenAI or of LLaMA-Factory's version 1:

    [{"type": "text", "text": "..."}, "..."]
    [{"type": "reasoning", "value": "..."}, {"type": "tool_call", "value": JSON text of a call}]
    [{"type": "text", "value": "..."}, {"type": "tools", "value": JSON text of a list}]

Chat templates take tools and calls in one form:

    tools       [{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}]
    tool_calls  [{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}]

Files have them as lists, as single objects or as JSON text, with or without the outer object. Templates write
arguments with `tojson`, which would quote a text again. Text that holds a JSON object therefore becomes that
object, with its keys in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from patch.data.formats.keys import first_key, is_absent, missing_keys, parse_json_text, quoted, text_of
from patch.errors import DataError

_TEXT_KEYS = ("text", "value")
_ORDER = {"reasoning": 0, "text": 1, "input_text": 1, "output_text": 1, "tool_call": 2, "tool_calls": 2}
"""Kinds of parts, and the order in which chat templates write the contents of these parts."""
_TOOLS = "tools"
_CALL_EXPECTED = 'an object such as {"name": "search", "arguments": {"query": "crepes"}}, or JSON text of one'
_TOOL_EXPECTED = "a list of tools, each with a name, or JSON text of one"


@dataclass(slots=True)
class MessageContent:
    """The parts of a message, by kind."""

    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)


def read_parts(parts: list[Any], where: str) -> MessageContent:
    """Return the content of the parts of a message; texts are concatenated.

    Raises:
        DataError: a part is not text, is of an unsupported kind, or templates write its kind earlier.
    """
    content, order = MessageContent(), 0
    for number, part in enumerate(parts, start=1):
        place = f"{where}: part {number}"
        if isinstance(part, str):
            part = {"text": part}
        if not isinstance(part, dict):
            raise DataError(f"{place}: got {quoted(part)}, expected text")
        kind = part.get("type") or "text"
        if kind != _TOOLS and kind not in _ORDER:
            raise DataError(
                f"{place}: got type {quoted(kind)}, expected text, reasoning, tool_call or tools: only text "
                "can be trained"
            )
        if _ORDER.get(kind, order) < order:
            raise DataError(
                f"{place}: got type {quoted(kind)} behind others, expected reasoning, text, tool calls in "
                "this order, as chat templates write them"
            )
        order = _ORDER.get(kind, order)
        key = first_key(part, _TEXT_KEYS)
        if key is None:
            raise DataError(f"{place}: {missing_keys(part, 'text or value', ['type', *_TEXT_KEYS])}")
        if kind == _TOOLS:
            content.tools += read_tools(part[key], place) or []
        elif kind.startswith("tool_call"):
            content.calls += read_calls(part[key], place)
        elif kind == "reasoning":
            content.reasoning += text_of(part, key, place)
        else:
            content.text += text_of(part, key, place)
    return content


def read_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """Return the tools of a row, from the value under `tools` or `functions`; or None if there are none.

    Raises:
        DataError: the value is neither a list of tools nor JSON text of one.
    """
    return [
        {"type": "function", **({} if function is tool else tool), "function": function}
        for tool, function, _ in _functions(value, where, _TOOL_EXPECTED)
    ] or None


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Return the calls of one message, from its tool_calls or function_call, or from a function_call turn.

    Raises:
        DataError: the value is neither a list of calls nor JSON text of one.
    """
    calls = []
    for call, function, place in _functions(value, where, _CALL_EXPECTED):
        arguments = parse_json_text(function.get("arguments"))
        if arguments is None or arguments == "":
            arguments = {}
        if not isinstance(arguments, (dict, str)):
            raise DataError(
                f"{place}: arguments: got {quoted(arguments)}, expected an object or its JSON text"
            )
        identity = {} if is_absent(call.get("id")) else {"id": call["id"]}
        calls.append(
            {"type": "function", **identity, "function": {"name": function["name"], "arguments": arguments}}
        )
    return calls


def _functions(
    value: Any, where: str, expected: str
) -> list[tuple[dict[str, Any], dict[str, Any], str]]:
    """Return the objects of a list, of JSON text or of one object: each with its function and its place."""
    value = parse_json_text(value)
    if is_absent(value):
        return []
    items = value if isinstance(value, list) else [value]
    found = []
    for number, item in enumerate(map(parse_json_text, items), start=1):
        place = f"{where}: {number}" if len(items) > 1 else where
        if not isinstance(item, dict):
            raise DataError(f"{place}: got {quoted(item)}, expected {expected}")
        function = item.get("function", item)  # the function may be the object itself
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            keys = function if isinstance(function, dict) else item
            raise DataError(f"{place}: {missing_keys(keys, expected, ['name', 'arguments', 'function'])}")
        found.append((item, function, place))
    return found
