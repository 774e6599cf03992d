"""Conversion of rows to conversations in the form that chat templates take.

`to_conversation`, `to_pair` and `to_unpaired` recognise the format of each row by its keys.
"""

from patch.data.formats.keys import columns_in, missing_keys
from patch.data.formats.rows import to_conversation, to_pair, to_unpaired
from patch.data.formats.turns import PLAIN, Conversation, FormatOptions, Message, Text

__all__ = [
    "PLAIN",
    "Conversation",
    "FormatOptions",
    "Message",
    "Text",
    "columns_in",
    "missing_keys",
    "to_conversation",
    "to_pair",
    "to_unpaired",
]
