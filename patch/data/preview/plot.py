"""The histogram of lengths as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from patch.data.preview.shown import visible_name
from patch.data.preview.statistics import Figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK = "#010203"
"""A colour that nothing else has; the page's own text colour takes its place."""
_BAR = "#2f8f4e"
_LIMIT = "#c05020"


def write_png(sets: Sequence[Figures], file: Path) -> None:
    """Write the histograms, one for each set, as a PNG file.

    Raises:
        OSError: it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = _figure(sets, "black")
    FigureCanvasAgg(figure).print_png(str(file))


def svg(sets: Sequence[Figures]) -> str:
    """The histograms as an <svg> element that loads nothing, in the colour of the text around it."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    picture = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "preview"}):
        figure = _figure(sets, _INK)
        figure.patch.set_alpha(0)
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        FigureCanvasSVG(figure).print_svg(picture, metadata=nothing)
    text = picture.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def _figure(sets: Sequence[Figures], ink: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7, 2.6 * len(sets)), layout="constrained")
    for number, each in enumerate(sets, start=1):
        axes = figure.add_subplot(len(sets), 1, number)
        axes.stairs(each.lengths.counts, each.lengths.edges, fill=True, color=_BAR)
        limit = ""
        if each.capacity is not None:
            axes.axvline(each.capacity, color=_LIMIT, linestyle="--")
            limit = f" (the line: {each.capacity} fit)"
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        # The font has few other characters.
        name = visible_name(each.name).encode("ascii", "backslashreplace").decode()
        axes.set_title(name, color=ink, parse_math=False)
        axes.set_xlabel(f"tokens of a {each.counted}{limit}", color=ink)
        axes.set_ylabel(f"{each.counted}s", color=ink)
        axes.tick_params(colors=ink)
        axes.patch.set_alpha(0)
        for spine in axes.spines.values():
            spine.set_color(ink)
    return figure
