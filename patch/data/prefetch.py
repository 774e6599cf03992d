"""Reads and collates the batches of coming steps in a thread, so that a step does not wait for its data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Semaphore
from typing import Protocol

from patch.data.samples import Batch
from patch.device import start_thread

_END_S = 5.0
"""How long `read_ahead` waits for a read that has begun. A file system that hangs must not keep a run from
ending; the thread is a daemon, so the process can end without it."""


class StepReader(Protocol):
    """Reads the micro-batches of one rank by iteration, as `BatchReader` does."""

    def step(self, iteration: int) -> list[Batch]:
        """This rank's micro-batches of the step `iteration`, counted from 0."""


@contextmanager
def read_ahead(reader: StepReader, steps: range, num_ahead: int) -> Iterator[StepReader]:
    """A context with a reader whose batches a thread reads ahead; they are those of `reader`.

    Its `step` takes the steps in their order. It raises what `reader.step` raised for that step, and may be
    called again for the last step that was taken.

    Args:
        reader: reads one step. The thread calls it, so nobody else should at the same time.
        steps: the steps that will be taken.
        num_ahead: how many steps are read ahead; 0: `reader` itself is given, without a thread.
    """
    if num_ahead == 0:
        yield reader
        return
    ahead = _AheadReader(reader, steps, num_ahead)
    try:
        yield ahead
    finally:
        ahead.close()


class _AheadReader:
    """Batches from a thread, or the error that ended it."""

    def __init__(self, reader: StepReader, steps: range, num_ahead: int) -> None:
        self._reader, self._steps = reader, steps
        self._room = Semaphore(num_ahead)
        self._outcomes: SimpleQueue[list[Batch] | Exception] = SimpleQueue()
        self._next = steps.start
        self._outcome: list[Batch] | Exception = []
        """Outcome of the step before `_next`."""
        self._is_closed = False
        self._thread = start_thread("read ahead", self._read_all)

    def step(self, iteration: int) -> list[Batch]:
        """The micro-batches of the next step, or again those of the last one."""
        if iteration == self._next and not isinstance(self._outcome, Exception):
            assert iteration in self._steps, "only these steps are read"
            self._outcome = self._outcomes.get()
            self._next += 1
            self._room.release()
        assert iteration == self._next - 1, "steps are taken in their order"
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    def close(self) -> None:
        """End the thread after the step that it reads now."""
        self._is_closed = True
        self._room.release()
        self._thread.join(_END_S)

    def _read_all(self) -> None:
        for iteration in self._steps:
            self._room.acquire()
            if self._is_closed:
                return
            try:
                self._outcomes.put(self._reader.step(iteration))
            except Exception as error:  # noqa: BLE001 - it is raised in the step that needs the data
                self._outcomes.put(error)
                return
