"""What a row becomes: a conversation, or a plain text; and what a user may say about the rows' keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from patch.config.choices import InputJoin
from patch.config.columns import parse_columns
from patch.config.schema import DataConfig

Message = dict[str, Any]
"""One turn as chat templates take it: role, content and, if there are any, tool_calls, tool_call_id, name."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of one row; a chat template writes them as one text."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    """Tools that the assistant may call, as chat templates take them."""
    learned: tuple[bool, ...]
    """For each message, whether it is learned; an assistant's message with False is context only."""
    where: str
    """File and row, for error messages."""


@dataclass(frozen=True, slots=True)
class Text:
    """A row that is one text: all of it is learned, and no chat template writes it."""

    text: str
    where: str
    """File and row, for error messages."""


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """What a user says about the rows of a file."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Our name of a key to the name that the rows have (`--columns`)."""
    alpaca_input_join: InputJoin = "newline"
    """What stands between alpaca's instruction and input."""


PLAIN = FormatOptions()
"""The rows have the usual keys."""


def format_options(data: DataConfig) -> FormatOptions:
    """What a run's configuration says about its rows.

    Raises:
        ConfigError: the map of columns cannot be read.
    """
    return FormatOptions(parse_columns(data.columns), data.alpaca_input_join)
