"""Spans of time, and what of some is covered by others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """From `begin` to `end`, in microseconds."""

    begin: float
    end: float
    name: str = ""

    @property
    def length(self) -> float:
        """Microseconds."""
        return self.end - self.begin


def merged(spans: Iterable[Span], gap: float = 0.0) -> list[Span]:
    """Spans without names that cover the same time and do not touch each other, in order.

    Args:
        spans: in any order, overlapping or not.
        gap: spans that are no further apart become one.
    """
    found: list[Span] = []
    for begin, end, *_ in sorted(spans):
        if found and begin <= found[-1].end + gap:
            found[-1] = Span(found[-1].begin, max(found[-1].end, end))
        elif end > begin:
            found.append(Span(begin, end))
    return found


def without(spans: Iterable[Span], others: Iterable[Span]) -> list[Span]:
    """What of `spans` is not covered by `others`, merged."""
    covers, found, first = merged(others), [], 0
    for begin, end, _ in merged(spans):
        while first < len(covers) and covers[first].end <= begin:
            first += 1
        for cover in covers[first:]:
            if cover.begin >= end:
                break
            if cover.begin > begin:
                found.append(Span(begin, cover.begin))
            begin = max(begin, cover.end)
        if begin < end:
            found.append(Span(begin, end))
    return found


def total(spans: Iterable[Span]) -> float:
    """Microseconds that are covered, each once."""
    return sum(span.length for span in merged(spans))


def within(spans: Iterable[Span], window: Span) -> list[Span]:
    """The parts of spans that lie in a window."""
    cut = (Span(max(s.begin, window.begin), min(s.end, window.end), s.name) for s in spans)
    return [span for span in cut if span.end > span.begin]


def innermost(spans: Sequence[Span], moment: float) -> str:
    """The name of the shortest span around a moment; "" if there is none."""
    around = [span for span in spans if span.begin <= moment < span.end]
    return min(around, key=lambda span: span.length).name if around else ""
