"""Conversations become text and tokens, of which the assistant's words are learned; see README.md."""

from patch.data.rendering.chat import ChatRenderer
from patch.data.rendering.encoder import SpanEncoder
from patch.data.rendering.spans import RenderOptions, Span, unmarked

__all__ = ["ChatRenderer", "RenderOptions", "Span", "SpanEncoder", "unmarked"]
