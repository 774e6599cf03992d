"""Changes values in the text of a JSON object; unchanged values keep their formatting."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_SPACE = re.compile(r"[\s,:]*")


class _Member(NamedTuple):
    key: str
    begin: int
    """Where the value begins in the text."""
    end: int
    """Where the value ends."""


def _members(text: str) -> Iterator[_Member]:
    """The members of the outermost object. The text must be valid JSON."""
    decoder, position = json.JSONDecoder(), text.index("{") + 1

    def skip(start: int) -> int:
        match = _SPACE.match(text, start)
        assert match is not None
        return match.end()

    position = skip(position)
    while text[position] != "}":
        key, end = decoder.raw_decode(text, position)
        begin = skip(end)
        _, end = decoder.raw_decode(text, begin)
        yield _Member(key, begin, end)
        position = skip(end)


def with_values(text: str, contents: Mapping[str, Any]) -> str:
    """The text of a JSON object with new contents.

    Values that differ are replaced in the text, everything else keeps its formatting. If keys are added or
    removed, the whole object is formatted again with an indent of two.

    Args:
        text: a JSON object.
        contents: all of its members after the change.
    """
    before = json.loads(text)
    if before.keys() != contents.keys():
        return json.dumps(contents, indent=2) + "\n"
    for key, begin, end in reversed(list(_members(text))):
        if before[key] != contents[key]:
            value = json.dumps(contents[key], indent=2).replace("\n", "\n  ")
            text = text[:begin] + value + text[end:]
    return text
