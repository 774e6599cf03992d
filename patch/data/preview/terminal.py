"""Rows as coloured tokens on a terminal. Without colours (pipes, NO_COLOR) the text has the same content.

    samples.jsonl: line 1: 11 tokens and a last label, 2 learned
            | [[<|begin_of_text|>]]|user|...
    learned | 4|[[<|eot_id|>]]

All tokens of a line are trained, or none is; its margin says which.
"""

from __future__ import annotations

import io
import unicodedata
from collections.abc import Iterator
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from patch.data.preview.figures import Figures
from patch.data.preview.tokens import (
    BORDER,
    INNER_BORDER,
    NEWLINE,
    SPACE,
    SPECIAL,
    TAB,
    ShownRow,
    ShownToken,
    lines_of,
    visible,
    visible_name,
)

_MARGINS = {True: "learned \u2503 ", False: "        \u2503 "}
_LEFT_TO_RIGHT = "\u200e"
"""Invisible mark on both sides of a right-to-left token, so that a terminal does not exchange tokens."""

_STYLES = {True: ("black on green", "black on bright_green"), False: ("default", "dim")}
"""Colours of trained and other tokens; two each, so that neighbours differ."""
_SPECIAL_STYLES = {True: "bold underline", False: "magenta"}
_BORDER_STYLE = "dim"


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
