"""Rows and figures as one HTML page: it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from patch.data.preview.pieces import Piece
from patch.data.preview.plot import svg
from patch.data.preview.shown import ShownRow, lines_of
from patch.data.preview.statistics import Figures
from patch.data.preview.visible import INNER_BORDER, visible, visible_name

_TEMPLATE = Path(__file__).with_name("page.html.jinja")


def page(title: str, tokenizer: str, sets: Sequence[Figures], rows: Sequence[ShownRow]) -> str:
    """The page as text. Whatever comes from the rows is escaped.

    Args:
        title: names what is shown.
        tokenizer: its name.
        sets: figures of the sets; may be empty.
        rows: the rows that are shown.
    """
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"visible": visible, "name": visible_name, "hover": _hover}
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        title=title,
        tokenizer=tokenizer,
        sets=sets,
        rows=rows,
        plot=svg(sets) if sets else "",
        lines_of=lines_of,
        inner_border=INNER_BORDER,
    )


def _hover(piece: Piece) -> str:
    if not piece.text:
        return f"id {piece.id}: continues a character"
    return f"id {piece.id}: {visible(piece.text)}"
