"""Spans: pieces of a rendered conversation; options of rendering; marks in special tokens.

Special tokens that a row's own text spells out are marked, so that they can be encoded as text. The mark is a
lone surrogate inside the token, which distinguishes it from the chat template's tokens. No text of a file
holds a lone surrogate, Jinja passes it on, and the encoder removes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from patch.config.choices import TrainOn


class Span(NamedTuple):
    """Piece of a sample's text. All of its tokens are trained, or none is. The text is *marked*: `MARK`
    is inserted into special tokens that the row's own text spells out, so an intact special token comes from
    the template. `unmarked` returns the readable text."""

    text: str
    learned: bool
    begins_text: bool = False
    """Whether the span is encoded as the beginning of a text, with the prefix space of some tokenizers,
    although other spans precede it. The first span of a sample is always encoded so."""
    begins_user_turn: bool = False
    """Whether the user speaks here, after text that is not trained."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """Options of rendering. By default all turns are trained, and special tokens in the rows are text.

    Args:
        train_on: "all" turns of the assistant, or "last": only turns after the last message of the user.
        allow_special_tokens: encode special tokens that a row's text spells out as such, not as text.
    """

    train_on: TrainOn = "all"
    allow_special_tokens: bool = False



MARK = "\ud800"


def unmarked(text: str) -> str:
    """Return the text without marks."""
    return text.replace(MARK, "")


def any_of(tokens: Iterable[str]) -> str:
    """Return a pattern of the tokens. The longest token comes first, as tokenizers prefer it."""
    return "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or r"(?!)"


class SpecialTokenMarker:
    """Marks the special tokens that are spelled out in texts."""

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = list(tokens)
        self._tokens = re.compile(any_of(tokens))
        # The first characters of a token at the end of a text: a template could write the rest after them.
        self._beginnings = tuple({token[:size] for token in tokens for size in range(1, len(token))})
        self._ends = frozenset(text[-1] for text in self._beginnings)

    def marked(self, value: Any) -> Any:
        """Return a copy of JSON-like data with every special token in texts and keys marked."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item) for item in value]
        return value

    def is_in(self, value: Any) -> bool:
        """Return whether a text or a key of JSON-like data spells out a special token."""
        if isinstance(value, str):
            return self._tokens.search(value) is not None
        if isinstance(value, dict):
            return any(self.is_in(key) or self.is_in(item) for key, item in value.items())
        return isinstance(value, (list, tuple)) and any(map(self.is_in, value))

    def _marked_text(self, text: str) -> str:
        text = self._tokens.sub(lambda match: _interrupted(match[0]), text)
        if text and text[-1] in self._ends and text.endswith(self._beginnings):
            return text + MARK
        return text


def _interrupted(token: str) -> str:
    """Put a mark after each character, because tokens may contain each other."""
    return MARK.join(token) + (MARK if len(token) == 1 else "")
