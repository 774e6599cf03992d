"""Tools that an assistant may call, and its calls, in the one form that chat templates take.

    tools       [{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}]
    tool_calls  [{"type": "function", "id": ..., "function": {"name": ..., "arguments": {...}}}]

Files have them as lists, as single objects or as JSON text, with or without the outer object. Templates write
arguments with `tojson`, which would put a text in quotes once more: so text that holds a JSON object becomes
that object, with its keys in their order.
"""

from __future__ import annotations

from typing import Any

from patch.data.formats.keys import from_json, is_absent, missing_keys, shown
from patch.errors import DataError


def read_tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    """The tools of a row; None if it has none.

    Args:
        value: what the row has under `tools` or `functions`.
        where: its place, for messages.
    Raises:
        DataError: it is neither a list of tools nor JSON text of one.
    """
    expected = "a list of tools, each with a name, or JSON text of one"
    return [
        {"type": "function", **tool, "function": _function(tool, place, expected)}
        if "function" in tool
        else {"type": "function", "function": _function(tool, place, expected)}
        for tool, place in _objects(value, where, expected)
    ] or None


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls of one message.

    Args:
        value: what a message has under `tool_calls` or `function_call`, or a function_call turn's content.
        where: its place, for messages.
    Raises:
        DataError: it is neither a list of calls nor JSON text of one.
    """
    expected = 'an object such as {"name": "search", "arguments": {"query": "crepes"}}, or JSON text of one'
    calls = []
    for call, place in _objects(value, where, expected):
        function = _function(call, place, expected)
        arguments = from_json(function.get("arguments"))
        if arguments is None or arguments == "":
            arguments = {}
        if not isinstance(arguments, (dict, str)):
            raise DataError(
                f"{place}: arguments: got {shown(arguments)}, expected an object or its JSON text"
            )
        identity = {} if is_absent(call.get("id")) else {"id": call["id"]}
        calls.append(
            {"type": "function", **identity, "function": {"name": function["name"], "arguments": arguments}}
        )
    return calls


def _objects(value: Any, where: str, expected: str) -> list[tuple[dict[str, Any], str]]:
    """The objects of a list, of JSON text or of a single object, each with its place."""
    value = from_json(value)
    if is_absent(value):
        return []
    items = value if isinstance(value, list) else [value]
    objects = []
    for number, item in enumerate(map(from_json, items), start=1):
        place = f"{where}: {number}" if len(items) > 1 else where
        if not isinstance(item, dict):
            raise DataError(f"{place}: got {shown(item)}, expected {expected}")
        objects.append((item, place))
    return objects


def _function(item: dict[str, Any], where: str, expected: str) -> dict[str, Any]:
    """The function of a tool or of a call, which may be the object itself."""
    function = item.get("function", item)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        keys = function if isinstance(function, dict) else item
        raise DataError(f"{where}: {missing_keys(keys, expected, ['name', 'arguments', 'function'])}")
    return function
