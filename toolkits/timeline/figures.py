"""The numbers of a step on each rank: compute, communication, and what of it nothing hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from patch.errors import DataError
from toolkits.timeline.trace import RankTrace, Span, merged, total, within, without

LEGEND = (
    "Exposed: messages, or copies, while nothing computes; both may be exposed at once. Host waits: the host "
    "waits for other ranks or its GPU, whatever else runs. Idle: no compute, no message, no copy."
)
"""What the columns mean."""
_MOST_EXPOSED = 5


@dataclass(frozen=True)
class Lanes:
    """One step of one rank; spans are cut to the step."""

    rank: int
    is_gpu: bool
    step: Span
    phases: list[Span]
    compute: list[Span]
    communication: list[Span]
    exposed: list[Span]
    """Communication while nothing computes."""
    copies: list[Span]
    waits: list[Span]

    @property
    def figures(self) -> dict[str, float]:
        """Milliseconds, by name; what overlaps within a lane counts once."""
        busy = total([*self.compute, *self.communication, *self.copies])
        return {
            "step_ms": _ms(self.step.length),
            "compute_ms": _ms(total(self.compute)),
            "communication_ms": _ms(total(self.communication)),
            "exposed_communication_ms": _ms(total(self.exposed)),
            "copies_ms": _ms(total(self.copies)),
            "exposed_copies_ms": _ms(total(without(self.copies, self.compute))),
            "host_waits_ms": _ms(total(self.waits)),
            "idle_ms": _ms(self.step.length - busy),
        }

    @property
    def most_exposed(self) -> list[tuple[str, float]]:
        """The messages that are exposed longest, with milliseconds, summed by name."""
        by_name: dict[str, list[Span]] = {}
        for span in self.communication:
            by_name.setdefault(span.name, []).append(span)
        exposed = [(name, _ms(total(without(own, self.compute)))) for name, own in by_name.items()]
        return sorted((pair for pair in exposed if pair[1] > 0), key=lambda pair: -pair[1])[:_MOST_EXPOSED]


def lanes_of(trace: RankTrace, step: int) -> Lanes:
    """What ran between the begin and the end of a step on the host.

    A GPU is a little behind: it may still end the step before, and its own end falls into the next one.

    Args:
        trace: of one rank.
        step: one of its steps.
    """
    window = trace.steps[step]
    compute = merged(within(trace.compute, window))
    communication = within(trace.communication, window)
    return Lanes(
        rank=trace.rank,
        is_gpu=trace.is_gpu,
        step=window,
        phases=within(trace.phases, window),
        compute=compute,
        communication=communication,
        exposed=without(communication, compute),
        copies=within(trace.copies, window),
        waits=merged(within(trace.waits, window)),
    )


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


def _ms(microseconds: float) -> float:
    return microseconds / 1e3
