"""A discrete-event simulation of streams: when each task begins and ends.

A stream does its tasks one after the other, in the order in which they are given, as a CUDA stream does. A
task begins when the one before it on its stream has ended and all that it waits for has. While another stream
works that a stream suffers from, its tasks take longer by a factor (kernels of messages take processors away
from compute; two streams share a link). Nothing else is modelled; times are exact but for rounding.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Stream = Hashable
"""The name of a stream."""
Contention = Mapping[tuple[Stream, Stream], float]
"""(a, b): while b works, tasks of a take this factor longer; factors of several streams are multiplied."""


class Task(NamedTuple):
    """Work of one stream."""

    stream: Stream
    seconds: float
    """If nothing slows it down."""
    after: tuple[int, ...] = ()
    """Indices of the tasks whose end it waits for."""
    label: str = ""


class Span(NamedTuple):
    """When a task began and ended, in seconds."""

    begin: float
    end: float


@dataclass(slots=True)
class _Work:
    """A task under way."""

    task: int
    left: float
    """Seconds of the task at `since`, if nothing slowed it down."""
    since: float
    factor: float

    @property
    def end(self) -> float:
        return self.since + self.left * self.factor

    def change(self, now: float, factor: float) -> None:
        self.left = max(0.0, self.left - (now - self.since) / self.factor)
        self.since, self.factor = now, factor


def simulate(tasks: Sequence[Task], contention: Contention | None = None) -> list[Span]:
    """Begin and end of each task.

    Raises:
        ValueError: tasks that wait for each other in a circle, with a label of theirs.
    """
    return _Simulation(tasks, contention or {}).run()


class _Simulation:
    def __init__(self, tasks: Sequence[Task], contention: Contention) -> None:
        self._tasks, self._contention = tasks, contention
        self._queues: dict[Stream, deque[int]] = defaultdict(deque)
        self._missing = [len(set(task.after)) for task in tasks]
        self._followers: list[list[int]] = [[] for _ in tasks]
        for index, task in enumerate(tasks):
            self._queues[task.stream].append(index)
            for needed in set(task.after):
                self._followers[needed].append(index)
        self._sufferers: dict[Stream, list[Stream]] = defaultdict(list)
        self._disturbers: dict[Stream, list[Stream]] = defaultdict(list)
        for sufferer, disturber in contention:
            self._sufferers[disturber].append(sufferer)
            self._disturbers[sufferer].append(disturber)
        self._working: dict[Stream, _Work] = {}
        self._ends: list[tuple[float, int, Stream]] = []
        """A heap; entries of ends that have changed since are skipped."""
        self._begun, self._ended = [0.0] * len(tasks), [0.0] * len(tasks)
        self._num_ended = 0

    def run(self) -> list[Span]:
        self._start(0.0, list(self._queues))
        while self._ends:
            now, index, stream = heapq.heappop(self._ends)
            work = self._working.get(stream)
            if work is not None and (work.task, work.end) == (index, now):
                self._finish(now, stream)
        if self._num_ended < len(self._tasks):
            left = next(queue[0] for queue in self._queues.values() if queue)
            raise ValueError(f"task {left} ({self._tasks[left].label}) waits for what waits for it")
        return [Span(*span) for span in zip(self._begun, self._ended, strict=True)]

    def _start(self, now: float, streams: Sequence[Stream]) -> None:
        """Begin what can begin on these streams."""
        for stream in streams:
            queue = self._queues[stream]
            if stream not in self._working and queue and not self._missing[queue[0]]:
                index = queue.popleft()
                self._begun[index] = now
                self._working[stream] = _Work(index, self._tasks[index].seconds, now, self._factor(stream))
                self._note_end(stream)
                self._disturb(now, stream)

    def _finish(self, now: float, stream: Stream) -> None:
        index = self._working.pop(stream).task
        self._ended[index] = now
        self._num_ended += 1
        for follower in self._followers[index]:
            self._missing[follower] -= 1
        followers = dict.fromkeys(self._tasks[follower].stream for follower in self._followers[index])
        self._start(now, [stream, *followers])
        if stream not in self._working:
            self._disturb(now, stream)

    def _disturb(self, now: float, stream: Stream) -> None:
        """A stream has begun or ceased to work: others become slower or faster."""
        for sufferer in self._sufferers[stream]:
            work = self._working.get(sufferer)
            if work is not None and work.factor != (factor := self._factor(sufferer)):
                work.change(now, factor)
                self._note_end(sufferer)

    def _factor(self, stream: Stream) -> float:
        factor = 1.0
        for disturber in self._disturbers[stream]:
            if disturber in self._working:
                factor *= self._contention[stream, disturber]
        return factor

    def _note_end(self, stream: Stream) -> None:
        work = self._working[stream]
        heapq.heappush(self._ends, (work.end, work.task, stream))
