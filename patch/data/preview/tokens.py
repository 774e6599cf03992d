"""Rows as tokens: the text of each token, whether it is trained, and texts with every character visible.

A token of a byte-level vocabulary, or a byte token of a SentencePiece vocabulary, may be part of a character.
Tokens therefore become bytes first, and the bytes of all tokens become characters. Each character is shown at
the token in which it begins.

No shown character acts on a terminal. Escape sequences, control characters and characters that change the
direction of writing are shown by name.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from patch.data.tokenizer import special_tokens

_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}
"""Byte-level vocabularies write each byte as a printable character. Source: GPT-2."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"

SPACE, NEWLINE, TAB = "\u2423", "\u21b5", "\u21e5"
"""Symbols for a space, a line feed and a tab: an open box, and two arrows."""
_SYMBOLS = {
    **{code: chr(0x2400 + code) for code in range(0x20)},  # such as ESC; the "control pictures" of Unicode
    0x7F: "\u2421",
    ord(" "): SPACE,
    ord("\n"): NEWLINE,
    ord("\t"): TAB,
}
_DOTTED_CIRCLE = "\u25cc"
"""Carrier of a mark (an accent, a vowel sign) whose letter is in another token."""
BORDER, INNER_BORDER = "\u2502", "\u2506"
"""Borders between two tokens, and between two tokens that share a character, shown in the first of them."""
SPECIAL = ("\u27e6", "\u27e7")
"""White square brackets around a special token."""
_TAKEN = {SPACE, NEWLINE, TAB, _DOTTED_CIRCLE, BORDER, INNER_BORDER, *SPECIAL}
"""Characters with a meaning in the preview. Data that has them is shown with their names."""
_ESCAPED_BYTES = range(0xDC80, 0xDD00)
"""Lone surrogates by which `surrogateescape` writes the bytes from 0x80 on."""


class ShownToken(NamedTuple):
    """One token of a sample."""

    id: int
    text: str
    """Characters that begin in this token; empty if the token only continues a character. A byte outside a
    character is a lone surrogate, as in Python's `surrogateescape`."""
    is_special: bool
    continues: bool
    """Whether its first byte continues a character that began in an earlier token."""
    is_learned: bool


class TokenTexts:
    """Texts of the tokens of a fast tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._special = set(special_tokens(tokenizer))
        self._added = {id_: token.content for id_, token in tokenizer.added_tokens_decoder.items()}
        self._backend = tokenizer.backend_tokenizer
        decoder = json.loads(self._backend.to_str())["decoder"] or {}
        self._steps = {step.get("type") for step in decoder.get("decoders", [decoder])}

    def shown(self, ids: np.ndarray, learned: np.ndarray) -> list[ShownToken]:
        """Return the tokens of a sample: `ids` integer [S], `learned` bool [S], whether each is trained."""
        parts = [self._bytes_of(id_) for id_ in ids.tolist()]
        text = b"".join(parts).decode(errors="surrogateescape")
        starts = [0, *accumulate(len(character.encode(errors="surrogateescape")) for character in text)]
        tokens, end = [], 0
        for id_, part, is_learned in zip(ids.tolist(), parts, learned.tolist(), strict=True):
            begin, end = end, end + len(part)
            first = bisect_left(starts, begin)
            tokens.append(
                ShownToken(
                    id_,
                    text[first : bisect_left(starts, end)],
                    self._added.get(id_) in self._special,
                    bool(part) and starts[first] > begin,
                    is_learned,
                )
            )
        return tokens

    def _bytes_of(self, id_: int) -> bytes:
        token = self._backend.id_to_token(id_)
        if id_ in self._added or token is None:
            return self._added.get(id_, f"<no token {id_}>").encode()
        if "ByteLevel" in self._steps:
            is_known = all(character in _BYTE_OF for character in token)
            return bytes(_BYTE_OF[character] for character in token) if is_known else token.encode()
        if "ByteFallback" in self._steps and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()


class ShownRow(NamedTuple):
    """Row or document, its samples, and remarks on it."""

    where: str
    samples: list[list[ShownToken]]
    """Empty if the row is dropped."""
    remarks: list[str]
    """Remarks: dropped, truncated, special tokens that became text."""
    is_pair: bool = False
    """Whether the samples are a preferred and a rejected answer."""
    has_label: bool = False
    """Whether the last token of a sample is only a label, which takes no slot in a sequence."""

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain values: ids and texts of each sample, and 1 for each trained token."""
        return {
            "where": self.where,
            "remarks": self.remarks,
            "samples": [
                {
                    "ids": [token.id for token in sample],
                    "texts": [visible(token.text) for token in sample],
                    "learned": [int(token.is_learned) for token in sample],
                }
                for sample in self.samples
            ],
        }


def lines_of(sample: list[ShownToken]) -> Iterator[list[ShownToken]]:
    """Yield the tokens of a sample in lines, so that all tokens of a line are trained, or none is. A line
    ends after a line break in the text, and where the loss begins or ends."""
    for _, tokens in groupby(sample, key=lambda token: token.is_learned):
        line: list[ShownToken] = []
        for token in tokens:
            line.append(token)
            if token.text.endswith("\n"):
                yield line
                line = []
        if line:
            yield line


def visible(text: str) -> str:
    """Return the text with a symbol, or a name such as <U+202E>, for each invisible character. A byte outside
    a character, written as a lone surrogate, becomes <0xE4>."""
    shown = "".join(map(_shown, text))
    return _DOTTED_CIRCLE + shown if text and unicodedata.category(text[0]).startswith("M") else shown


def visible_name(text: str) -> str:
    """Return the visible form of a name or a message, with its spaces as they are."""
    return " ".join(map(visible, text.split(" ")))


def _shown(character: str) -> str:
    code = ord(character)
    if code in _SYMBOLS:
        return _SYMBOLS[code]
    if code in _ESCAPED_BYTES:
        return f"<0x{code - 0xDC00:02X}>"
    return character if character.isprintable() and character not in _TAKEN else f"<U+{code:04X}>"
