"""A message's content as a list of parts: OpenAI's, and those of LLaMA-Factory's version 1.

[{"type": "text", "text": "..."}, "..."]
[{"type": "reasoning", "value": "..."}, {"type": "text", "value": "..."}, {"type": "tool_call", "value": ...}]
[{"type": "text", "value": "..."}, {"type": "tools", "value": JSON text of a list}]
"""

from __future__ import annotations

from typing import Any, NamedTuple

from patch.data.formats.keys import first_key, missing_keys, shown, text_of
from patch.data.formats.tools import read_calls, read_tools
from patch.errors import DataError

_TEXT_KEYS = ("text", "value")
_ORDER = {"reasoning": 0, "text": 1, "input_text": 1, "output_text": 1, "tool_call": 2, "tool_calls": 2}
"""The kinds of parts, and the order in which chat templates write what becomes of them."""
_TOOLS = "tools"


class Content(NamedTuple):
    """What the parts of a message are."""

    text: str
    reasoning: str = ""
    calls: tuple[dict[str, Any], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()


def read_parts(parts: list[Any], where: str) -> Content:
    """The content that parts make; texts are concatenated.

    Args:
        parts: the content of a message.
        where: its place, for messages.
    Raises:
        DataError: a part is no text, of a kind that is not read, or behind one that templates write later.
    """
    content, order = Content(""), 0
    for number, part in enumerate(parts, start=1):
        place = f"{where}: part {number}"
        kind = _kind(part, place)
        if _ORDER.get(kind, order) < order:
            raise DataError(
                f"{place}: got type {shown(kind)} behind others, expected reasoning, text, tool calls in "
                "this order, as chat templates write them"
            )
        order = _ORDER.get(kind, order)
        content = _with(content, kind, part, place)
    return content


def _kind(part: Any, where: str) -> str:
    if not isinstance(part, (dict, str)):
        raise DataError(f"{where}: got {shown(part)}, expected text")
    kind = "text" if isinstance(part, str) else part.get("type") or "text"
    if kind != _TOOLS and kind not in _ORDER:
        raise DataError(
            f"{where}: got type {shown(kind)}, expected text, reasoning, tool_call or tools: only text can "
            "be trained"
        )
    return kind


def _with(content: Content, kind: str, part: dict[str, Any] | str, where: str) -> Content:
    """The content with one more part."""
    if isinstance(part, str):
        return content._replace(text=content.text + part)
    key = first_key(part, _TEXT_KEYS)
    if key is None:
        raise DataError(f"{where}: {missing_keys(part, 'text or value', ['type', *_TEXT_KEYS])}")
    if kind == _TOOLS:
        return content._replace(tools=(*content.tools, *(read_tools(part[key], where) or ())))
    if kind.startswith("tool_call"):
        return content._replace(calls=(*content.calls, *read_calls(part[key], where)))
    said = text_of(part, key, where)
    if kind == "reasoning":
        return content._replace(reasoning=content.reasoning + said)
    return content._replace(text=content.text + said)
