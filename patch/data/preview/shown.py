"""What is shown of a set: some of its rows, each with the samples it gives.

Texts are shown so that every character can be seen and none acts on a terminal: escape sequences, control
characters and characters that change the direction of writing by name.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from patch.data.preview.pieces import Piece, TokenTexts

SPACE, NEWLINE, TAB = "\u2423", "\u21b5", "\u21e5"
"""What stands for a space, a line feed and a tabulator: an open box, and two arrows."""

_SYMBOLS = {
    **{code: chr(0x2400 + code) for code in range(0x20)},  # such as ESC; the "control pictures" of Unicode
    0x7F: "\u2421",
    ord(" "): SPACE,
    ord("\n"): NEWLINE,
    ord("\t"): TAB,
}
_DOTTED_CIRCLE = "\u25cc"
"""Carries a mark (an accent, a vowel sign) whose letter is in another token."""
BORDER, INNER_BORDER = "\u2502", "\u2506"
"""Between two tokens; and between two tokens that share a character, which is shown in the first of them."""
SPECIAL = ("\u27e6", "\u27e7")
"""Around a special token: white square brackets."""
_TAKEN = {SPACE, NEWLINE, TAB, _DOTTED_CIRCLE, BORDER, INNER_BORDER, *SPECIAL}
"""Data that has these characters is shown with their names, so that each of them means one thing."""
_ESCAPED_BYTES = range(0xDC80, 0xDD00)
"""How `surrogateescape` writes the bytes from 0x80 on."""


def visible(text: str) -> str:
    """The text with a symbol, or a name such as <U+202E>, for each character that cannot be seen.

    A byte that is no part of a character, written as a lone surrogate, becomes <0xE4>.
    """
    shown = "".join(map(_shown, text))
    return _DOTTED_CIRCLE + shown if text and unicodedata.category(text[0]).startswith("M") else shown


def visible_name(text: str) -> str:
    """A name or a message: its spaces stay as they are."""
    return " ".join(map(visible, text.split(" ")))


def is_right_to_left(text: str) -> bool:
    """Whether a character of the text is written from right to left."""
    return any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in text)


def _shown(character: str) -> str:
    code = ord(character)
    if code in _SYMBOLS:
        return _SYMBOLS[code]
    if code in _ESCAPED_BYTES:
        return f"<0x{code - 0xDC00:02X}>"
    return character if character.isprintable() and character not in _TAKEN else f"<U+{code:04X}>"


class ShownToken(NamedTuple):
    """A token of a sample."""

    piece: Piece
    is_learned: bool


def shown_tokens(texts: TokenTexts, ids: np.ndarray, learned: np.ndarray) -> list[ShownToken]:
    """A sample as it is shown.

    Args:
        texts: says what ids stand for.
        ids: integer [S].
        learned: bool [S], whether each is learned.
    """
    return [ShownToken(*pair) for pair in zip(texts.pieces(ids.tolist()), learned.tolist(), strict=True)]


class ShownRow(NamedTuple):
    """A row and what became of it."""

    where: str
    """File and row."""
    samples: list[list[ShownToken]]
    """Empty if the row is dropped."""
    remarks: list[str]
    """What happened to it on the way: dropped, cut, special tokens that became text."""

    def to_json(self) -> dict[str, Any]:
        """The row as plain values: for each sample its ids, their texts, and 1 for those that are learned."""
        return {
            "where": self.where,
            "remarks": self.remarks,
            "samples": [
                {
                    "ids": [token.piece.id for token in sample],
                    "texts": [visible(token.piece.text) for token in sample],
                    "learned": [int(token.is_learned) for token in sample],
                }
                for sample in self.samples
            ],
        }


def lines_of(sample: list[ShownToken]) -> Iterator[list[ShownToken]]:
    """The tokens of a sample in lines: a line ends after a line break in the text, and where learning begins
    or ends, so all tokens of a line are learned, or none is."""
    for _, tokens in groupby(sample, key=lambda token: token.is_learned):
        line: list[ShownToken] = []
        for token in tokens:
            line.append(token)
            if token.piece.text.endswith("\n"):
                yield line
                line = []
        if line:
            yield line
