"""Conversion of rows to conversations in the form that chat templates take; `read_row` is the entry."""

from patch.data.formats.keys import columns_in, missing_keys
from patch.data.formats.rows import read_row, to_conversation, to_pair, to_unpaired
from patch.data.formats.turns import PLAIN, Conversation, FormatOptions, Message, Text

__all__ = [
    "PLAIN",
    "Conversation",
    "FormatOptions",
    "Message",
    "Text",
    "columns_in",
    "missing_keys",
    "read_row",
    "to_conversation",
    "to_pair",
    "to_unpaired",
]
