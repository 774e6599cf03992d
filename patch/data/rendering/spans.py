"""Spans: pieces of a rendered conversation; and how rows are rendered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
    """How rows are rendered.

    Args:
        train_on: learn all turns of the assistant, or only what it says after the last message of the user.
        allow_special_tokens: special tokens that a row's text spells out are encoded as such, not as text.
    """

    train_on: TrainOn = "all"
    allow_special_tokens: bool = False


PLAIN = RenderOptions()
"""All turns are learned, and special tokens in the rows are text."""
