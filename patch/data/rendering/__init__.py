"""Rendering of conversations as text and tokens; the assistant's words are trained. See README.md."""

from patch.data.rendering.chat import ChatRenderer
from patch.data.rendering.encoder import SpanEncoder
from patch.data.rendering.spans import RenderOptions, Span, unmarked

__all__ = ["ChatRenderer", "RenderOptions", "Span", "SpanEncoder", "unmarked"]
