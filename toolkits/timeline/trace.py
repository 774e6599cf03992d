"""A rank's trace, sorted into lanes: phases, compute, communication, offload copies, waits of the host.

On a GPU compute are kernels, communication NCCL's kernels, copies those to and from the host, waits of the
host its synchronizations. On a CPU compute are torch's operators, with up to 0.3 ms of Python between two of
them, and the optimizer's kernels, less the waits; communication are gloo's messages: one that is sent or
received counts until somebody has waited for it, since gloo tells no one else. A message has the name of the
region in which it was started, such as "bucket 3 reduce-scatter".
"""

from __future__ import annotations

import gzip
import io
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from patch.errors import DataError
from patch.storage.text_files import read_small


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


Event = Mapping[str, Any]
_MOST_BYTES = 1 << 31
_STEP = re.compile(r"step (\d+)")
_PHASES = ("data reading", "forward", "backward", "reduction", "update")
_NAMED = re.compile(r"(bucket|chunk) \d+ .*")
_UPDATE = re.compile(r"update of buckets .*|chunk \d+ update")
_COPY = re.compile(r"chunk \d+ to (host|device)")
_WAIT = re.compile(r"wait( for .*)?")
_PYTHON_US = 300.0
"""Between operators, on a CPU. A thread that is blocked by a collective runs none for longer."""
_HOST_COPY = re.compile(r"Memcpy (HtoD|DtoH)")


@dataclass
class RankTrace:
    """What one rank did; spans are in microseconds of its machine's clock."""

    rank: int
    is_gpu: bool
    steps: dict[int, Span]
    phases: list[Span] = field(default_factory=list)
    compute: list[Span] = field(default_factory=list)
    communication: list[Span] = field(default_factory=list)
    copies: list[Span] = field(default_factory=list)
    waits: list[Span] = field(default_factory=list)

    def cut(self, step: int) -> RankTrace:
        """What ran between the begin and the end of a step on the host.

        A GPU is a little behind: it may still end the step before, and its own end falls into the next one.
        """
        window = self.steps[step]
        lanes = (self.phases, self.compute, self.communication, self.copies, self.waits)
        return RankTrace(self.rank, self.is_gpu, {step: window}, *(within(lane, window) for lane in lanes))


def read_trace(file: Path) -> RankTrace:
    """Read one file of log/traces.

    Raises:
        DataError: it cannot be read, is no trace of torch's profiler, or has no step of --profile.
    """
    try:
        content = read_small(file, _MOST_BYTES)
        if content[:2] == b"\x1f\x8b":
            content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(_MOST_BYTES)
        trace = orjson.loads(content)
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
        return sort_events(events, trace.get("distributedInfo", {}).get("rank", _rank_in_name(file)))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        what = "expected a trace that --profile wrote (log/traces/rank_0.json.gz)"
        raise DataError(f"{file}: {what}: {error or type(error).__name__}") from error


def sort_events(events: Iterable[Event], rank: int) -> RankTrace:
    """The lanes of the complete events (`ph` X) of a trace.

    Args:
        events: of torch's profiler.
        rank: whose trace it is.
    Raises:
        ValueError: there is no step of --profile.
    """
    events = list(events)
    regions = [event for event in events if event.get("cat") == "user_annotation"]
    steps = {int(found[1]): _span(e) for e in regions if (found := _STEP.fullmatch(e["name"]))}
    if not steps:
        raise ValueError("it has no step")
    is_gpu = any(event.get("cat") == "kernel" for event in events)
    lanes = RankTrace(rank, is_gpu, steps)
    lanes.phases = [_span(event) for event in regions if event["name"] in _PHASES]
    lanes.waits = [_span(event) for event in regions if _WAIT.fullmatch(event["name"])]
    (_sort_gpu if is_gpu else _sort_cpu)(lanes, events, _labels(regions))
    return lanes


def _sort_gpu(lanes: RankTrace, events: list[Event], labels: dict[Any, list[Span]]) -> None:
    launches = {e["args"]["correlation"]: e for e in events if _is_runtime(e) and "correlation" in e["args"]}
    for event in events:
        kind, name = event.get("cat"), event["name"]
        if kind == "kernel" and "nccl" in name.lower():
            lanes.communication.append(_labelled(event, launches, labels))
        elif kind == "kernel":
            lanes.compute.append(_span(event))
        elif kind == "gpu_memcpy" and _HOST_COPY.match(name):
            lanes.copies.append(_labelled(event, launches, labels))
        elif _is_runtime(event) and "Synchronize" in name:
            lanes.waits.append(_span(event))


def _sort_cpu(lanes: RankTrace, events: list[Event], labels: dict[Any, list[Span]]) -> None:
    operators: dict[Any, list[Span]] = {}
    for event in events:
        kind, name = event.get("cat"), event["name"]
        if kind == "user_annotation" and name.startswith("gloo:"):
            label = innermost(labels.get(event["tid"], ()), event["ts"])
            lanes.communication.append(_span(event, label or name))
        elif kind == "user_annotation" and _COPY.fullmatch(name):
            lanes.copies.append(_span(event))
        elif (kind == "cpu_op" and name.startswith("aten::")) or _UPDATE.fullmatch(name):
            operators.setdefault(event["tid"], []).append(_span(event))
    waits: dict[Any, list[Span]] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and _WAIT.fullmatch(event["name"]):
            waits.setdefault(event["tid"], []).append(_span(event))
    threads = [without(merged(own, _PYTHON_US), waits.get(thread, ())) for thread, own in operators.items()]
    lanes.compute = merged(span for own in threads for span in own)


def _labels(regions: Iterable[Event]) -> dict[Any, list[Span]]:
    """The regions of buckets and chunks of each thread of the host."""
    found: dict[Any, list[Span]] = {}
    for event in regions:
        if _NAMED.fullmatch(event["name"]):
            found.setdefault(event["tid"], []).append(_span(event))
    return found


def _labelled(event: Event, launches: Mapping[Any, Event], labels: Mapping[Any, list[Span]]) -> Span:
    """What runs on the GPU, with the name of the region in which the host launched it."""
    launch = launches.get(event.get("args", {}).get("correlation"))
    label = innermost(labels.get(launch["tid"], ()), launch["ts"]) if launch else ""
    return _span(event, label or event["name"])


def _is_runtime(event: Event) -> bool:
    return event.get("cat") in ("cuda_runtime", "cuda_driver") and "args" in event


def _span(event: Event, name: str = "") -> Span:
    return Span(event["ts"], event["ts"] + event["dur"], name or event["name"])


def _rank_in_name(file: Path) -> int:
    """The number in rank_3.json.gz; a trace of one process does not say its rank."""
    found = re.search(r"\d+", file.name)
    return int(found[0]) if found else 0
