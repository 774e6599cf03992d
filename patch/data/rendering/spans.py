"""Spans: pieces of a rendered conversation; how rows are rendered; special tokens in them.

Special tokens that a row's own text spells out are marked, so that they can be encoded as text. A lone
surrogate inside such a token separates it from those that the chat template writes. No text of a file holds
one, Jinja passes it on, and the encoder takes it out again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from patch.config.choices import TrainOn


class Span(NamedTuple):
    """A piece of a sample's text, whose tokens are all learned or all not learned.

    The text is *marked*: special tokens that the row's own text spells out are interrupted by
    `special_tokens.MARK`, so every special token that can be found in it was written by the template.
    `special_tokens.unmarked` gives the text as people read it.
    """

    text: str
    learned: bool
    begins_text: bool = False
    """Encoded as the beginning of a text, with the prefix space of tokenizers that write one, although other
    spans come before. The first span of a sample is always encoded so."""
    begins_turn: bool = False
    """The user speaks here, and what comes before is not learned."""


@dataclass(frozen=True, slots=True)
class RenderOptions:
    """How rows are rendered: by default all turns are learned, and special tokens in the rows are text.

    Args:
        train_on: learn all turns of the assistant, or only what it says after the last message of the user.
        allow_special_tokens: special tokens that a row's text spells out are encoded as such, not as text.
    """

    train_on: TrainOn = "all"
    allow_special_tokens: bool = False



MARK = "\ud800"


def unmarked(text: str) -> str:
    """The text without marks."""
    return text.replace(MARK, "")


def any_of(tokens: Iterable[str]) -> str:
    """A pattern of the tokens; the longest comes first, as tokenizers prefer it."""
    return "|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or r"(?!)"


class SpecialTokenMarker:
    """Marks the special tokens that are spelled out in texts.

    Args:
        tokens: the special tokens.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = list(tokens)
        self._tokens = re.compile(any_of(tokens))
        # The first characters of a token at the end of a text: a template could write the others after it.
        self._beginnings = tuple({token[:size] for token in tokens for size in range(1, len(token))})
        self._ends = frozenset(text[-1] for text in self._beginnings)

    def marked(self, value: Any) -> Any:
        """A copy of JSON-like data in which every special token in a text, or in a key, is marked."""
        if isinstance(value, str):
            return self._marked_text(value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item) for item in value]
        return value

    def is_in(self, value: Any) -> bool:
        """Whether a text or a key of JSON-like data spells out a special token."""
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
    """The token with a mark after each character, as tokens may contain each other."""
    return MARK.join(token) + (MARK if len(token) == 1 else "")
