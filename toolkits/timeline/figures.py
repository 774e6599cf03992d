"""The numbers of a step on each rank, and their page: compute, communication, and what of it nothing hides.

The page is one file with inline SVG, which loads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from patch.errors import DataError
from toolkits.timeline.trace import RankTrace, Span, merged, total, without

LEGEND = (
    "Exposed: messages, or copies, while nothing computes; both may be exposed at once. Host waits: the host "
    "waits for other ranks or its GPU, whatever else runs. Idle: no compute, no message, no copy."
)
"""What the columns mean."""
_MOST_EXPOSED = 5
_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_WIDTH = 10_000.0
"""Units of the drawing, which the page stretches."""
_NARROWEST = 2.0
"""Compute that is nearer than this is drawn as one."""


def choose_step(traces: Sequence[RankTrace], wanted: int | None) -> int:
    """The step to draw: the wanted one, or the last that all traces have.

    Args:
        traces: of all ranks.
        wanted: of --step; None: the last one.
    Raises:
        DataError: not all traces have it.
    """
    common = set.intersection(*(set(trace.steps) for trace in traces))
    if not common:
        each = "; ".join(f"rank {trace.rank} {sorted(trace.steps)}" for trace in traces)
        raise DataError(f"the traces have no step in common: {each}")
    if wanted is not None and wanted not in common:
        raise DataError(f"--step {wanted}: expected one of {sorted(common)}, the steps that all traces have")
    return max(common) if wanted is None else wanted


def figures_of(each: RankTrace, step: int) -> dict[str, float]:
    """Milliseconds of one step of a rank, by name; what overlaps within a lane counts once.

    Args:
        each: the rank's trace, cut to the step.
        step: its number.
    """
    spans = {
        "step_ms": [each.steps[step]],
        "compute_ms": each.compute,
        "communication_ms": each.communication,
        "exposed_communication_ms": without(each.communication, each.compute),
        "copies_ms": each.copies,
        "exposed_copies_ms": without(each.copies, each.compute),
        "host_waits_ms": each.waits,
        "idle_ms": without([each.steps[step]], [*each.compute, *each.communication, *each.copies]),
    }
    return {name: total(own) / 1e3 for name, own in spans.items()}


def most_exposed(each: RankTrace) -> list[tuple[str, float]]:
    """The messages of a step that are exposed longest, with milliseconds, summed by name."""
    by_name: dict[str, list[Span]] = {}
    for span in each.communication:
        by_name.setdefault(span.name, []).append(span)
    exposed = [(name, total(without(own, each.compute)) / 1e3) for name, own in by_name.items()]
    return sorted((pair for pair in exposed if pair[1] > 0), key=lambda pair: -pair[1])[:_MOST_EXPOSED]


def page_of(lanes: Sequence[RankTrace], step: int) -> str:
    """The HTML of one step.

    Ranks begin at their places on the clock of the machine; clocks of several machines may differ.

    Args:
        lanes: of all ranks, cut to the step.
        step: its number.
    """
    windows = [each.steps[step] for each in lanes]
    begin, end = min(window.begin for window in windows), max(window.end for window in windows)
    scale = _WIDTH / (end - begin)

    def place(span: Span) -> dict[str, object]:
        at, width = (span.begin - begin) * scale, max(span.length * scale, 1.0)
        moment = f"{(span.begin - begin) / 1e3:.3f} ms, {span.length / 1e3:.3f} ms long"
        return {"x": f"{at:.1f}", "width": f"{width:.1f}", "title": f"{span.name} {moment}".strip()}

    def drawn(each: RankTrace) -> dict[str, list[dict[str, object]]]:
        found = {
            "phases": each.phases, "compute": merged(each.compute, gap=_NARROWEST / scale),
            "messages": each.communication, "exposed": without(each.communication, each.compute),
            "copies": each.copies, "host waits": merged(each.waits),
        }  # fmt: skip
        return {
            name: [place(span) | {"kind": _kind(name, span)} for span in own] for name, own in found.items()
        }

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    ranks = [{"rank": each.rank, "lanes": drawn(each), "figures": figures_of(each, step),
              "most": most_exposed(each)} for each in lanes]  # fmt: skip
    return template.render(step=step, ranks=ranks, total_ms=(end - begin) / 1e3, width=_WIDTH, legend=LEGEND,
                           has_gpu=any(each.is_gpu for each in lanes))  # fmt: skip


def _kind(lane: str, span: Span) -> str:
    """The class of a rectangle: of a phase its name, else the lane's."""
    return (span.name if lane == "phases" else lane).replace(" ", "-")
