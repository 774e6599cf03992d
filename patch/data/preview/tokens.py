"""Rows as tokens: the text of each token, whether it is trained, and texts with every character visible.

A token of a byte-level vocabulary, or a byte token of a SentencePiece vocabulary, may be part of a character.
Tokens therefore become bytes first, and the bytes of all tokens become characters. Each character is shown at
the token in which it begins.

No shown character acts on a terminal. Escape sequences, control characters and characters that change the
direction of writing are shown by name. Without colours (pipes, NO_COLOR) the text has the same content.

    samples.jsonl: line 1: 11 tokens and a last label, 2 learned
            | [[<|begin_of_text|>]]|user|...
    learned | 4|[[<|eot_id|>]]

All tokens of a line are trained, or none is; its margin says which.
"""

from __future__ import annotations

import io
import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate, groupby
from typing import Any, NamedTuple, TextIO

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from patch.data.preview.figures import Figures
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

_MARGINS = {True: "learned \u2503 ", False: "        \u2503 "}
_LEFT_TO_RIGHT = "\u200e"
"""Invisible mark on both sides of a right-to-left token, so that a terminal does not exchange tokens."""

_STYLES = {True: ("black on green", "black on bright_green"), False: ("default", "dim")}
"""Colours of trained and other tokens; two each, so that neighbours differ."""
_SPECIAL_STYLES = {True: "bold underline", False: "magenta"}
_BORDER_STYLE = "dim"


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


def terminal(stream: TextIO) -> Console:
    """Return a console on a stream. Characters that its encoding lacks become escapes, such as \\u2502."""
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    return Console(file=stream, highlight=False, soft_wrap=True, markup=False, emoji=False)


def print_legend(console: Console) -> None:
    """Print the meaning of the signs."""
    legend = Text.assemble(
        ("learned \u2503", "bold"), " the loss covers this line; ", f"{BORDER} between tokens, ",
        f"{INNER_BORDER} between two tokens within a character; {SPECIAL[0]}special token{SPECIAL[1]}; "
        f"{SPACE} space, {NEWLINE} new line, {TAB} tab",
    )  # fmt: skip
    console.print(legend, style="dim")


def print_row(console: Console, row: ShownRow, max_lines: int | None = None) -> None:
    """Print a row: its place, remarks on it, and at most `max_lines` lines of tokens for each sample."""
    for number, sample in enumerate(row.samples or [[]], start=1):
        heading = Text(visible_name(row.where), style="bold")
        if row.is_pair and row.samples:
            heading.append(f", {('chosen', 'rejected')[number - 1]}")
        elif len(row.samples) > 1:
            heading.append(f", sample {number} of {len(row.samples)}")
        if sample:
            learned = sum(token.is_learned for token in sample)
            size, label = len(sample) - row.has_label, " and a last label" * row.has_label
            heading.append(f": {size} tokens{label}, {learned} learned ({learned / size:.1%})")
        console.print(heading)
        for remark in row.remarks if number == 1 else ():
            console.print(Text(f"  {visible_name(remark)}", style="yellow"))
        lines = list(_lines(sample, console.width))
        for line in lines[:max_lines]:
            console.print(line)
        if max_lines is not None and len(lines) > max_lines:
            console.print(Text(f"        \u2503 ... {len(lines) - max_lines} more lines"))


def print_figures(console: Console, figures: Figures) -> None:
    """Print the figures of a set."""
    console.print(Text(visible_name(figures.name), style="bold"))
    longest = max(len(name) for name, _ in figures.table)
    for name, value in figures.table:
        console.print(Text.assemble((f"  {name:<{longest}}  ", "dim"), visible_name(value)))


def _lines(sample: list[ShownToken], width: int) -> Iterator[Text]:
    """Yield lines of tokens, wrapped between tokens at `width` cells."""
    index = 0
    for tokens in lines_of(sample):
        line = _begun(tokens[0].is_learned)
        for place, token in enumerate(tokens):
            text = _token_text(token)
            if place and line.cell_len + 1 + cell_len(text) > width:
                yield line
                line, place = _begun(token.is_learned), 0
            if place or token.continues:
                line.append(INNER_BORDER if token.continues else BORDER, style=_BORDER_STYLE)
            line.append(text, style=_style(token, index))
            index += 1
        yield line


def _begun(is_learned: bool) -> Text:
    return Text.assemble((_MARGINS[is_learned], "bold" if is_learned else "dim"))


def _token_text(token: ShownToken) -> str:
    text = visible(token.text)
    if token.is_special:
        return SPECIAL[0] + text + SPECIAL[1]
    is_right_to_left = any(unicodedata.bidirectional(character) in ("R", "AL", "AN") for character in text)
    return _LEFT_TO_RIGHT + text + _LEFT_TO_RIGHT if is_right_to_left else text


def _style(token: ShownToken, index: int) -> str:
    style = _STYLES[token.is_learned][index % 2]
    return f"{_SPECIAL_STYLES[token.is_learned]} {style}" if token.is_special else style
