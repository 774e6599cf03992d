"""The page: one file with inline SVG, which loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from toolkits.timeline.figures import LEGEND, Lanes
from toolkits.timeline.trace import Span, merged

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_WIDTH = 10_000.0
"""Units of the drawing, which the page stretches."""
_NARROWEST = 2.0
"""Compute that is nearer than this is drawn as one."""


def page_of(lanes: Sequence[Lanes], step: int) -> str:
    """The HTML of one step.

    Ranks begin at their places on the clock of the machine; clocks of several machines may differ.

    Args:
        lanes: of all ranks.
        step: its number.
    """
    begin, end = min(each.step.begin for each in lanes), max(each.step.end for each in lanes)
    scale = _WIDTH / (end - begin)

    def place(span: Span) -> dict[str, object]:
        at, width = (span.begin - begin) * scale, max(span.length * scale, 1.0)
        moment = f"{(span.begin - begin) / 1e3:.3f} ms, {span.length / 1e3:.3f} ms long"
        return {"x": f"{at:.1f}", "width": f"{width:.1f}", "title": f"{span.name} {moment}".strip()}

    def drawn(each: Lanes) -> dict[str, list[dict[str, object]]]:
        compute = merged(each.compute, gap=_NARROWEST / scale)
        found = {
            "phases": each.phases, "compute": compute, "messages": each.communication,
            "exposed": each.exposed, "copies": each.copies, "host waits": each.waits,
        }  # fmt: skip
        return {
            name: [place(span) | {"kind": _kind(name, span)} for span in own] for name, own in found.items()
        }

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    ranks = [{"rank": each.rank, "lanes": drawn(each), "figures": each.figures, "most": each.most_exposed}
             for each in lanes]  # fmt: skip
    return template.render(step=step, ranks=ranks, total_ms=(end - begin) / 1e3, width=_WIDTH, legend=LEGEND,
                           has_gpu=any(each.is_gpu for each in lanes))  # fmt: skip


def _kind(lane: str, span: Span) -> str:
    """The class of a rectangle: of a phase its name, else the lane's."""
    return (span.name if lane == "phases" else lane).replace(" ", "-")
