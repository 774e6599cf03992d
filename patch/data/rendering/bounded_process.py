"""A pool of processes that run foreign code, such as a chat template, with bounded CPU time and memory.

Jinja's sandbox bounds neither, and a signal handler cannot interrupt an operation that does not return to the
interpreter (10 ** 10 ** 10). The kernel's limits bound both. CPU time is limited, not elapsed time, so a busy
machine causes no refusal.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import signal
import stat
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.process import BaseProcess
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import psutil

from patch.errors import TrainingError

SECONDS = 15
"""CPU time for one step of an item; a normal item takes milliseconds."""
BYTES = 2 << 30
"""Memory in addition to what the parent has when it forks."""
_LISTS_AHEAD = 3
"""For each process, lists that are read before the first of them is given."""
_PR_SET_PDEATHSIG = 1
_PARALLEL_TOKENIZERS = "TOKENIZERS_PARALLELISM"

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class ChildEndedError(Exception):
    """A process of a pool ended while it worked on one item, or needed too much memory for it.

    Args:
        item: what it worked on.
        step: how often `next_step` was called for the item.
        reason: what it did, such as "takes more than 15 s".
        was_killed: whether it was killed from outside, so the item need not be the reason.
    """

    def __init__(self, item: Any, step: int, reason: str, was_killed: bool = False) -> None:
        super().__init__(item, step, reason, was_killed)  # all of them, as it is pickled in a child
        self.item, self.step, self.reason, self.was_killed = item, step, reason, was_killed

    def __str__(self) -> str:
        return self.reason


class _Pending(NamedTuple):
    """A list that some process works on, or will."""

    number: int
    items: list[Any]
    results: Future[list[Any]]


class BoundedMap(Generic[_Item, _Result]):
    """Applies a function to lists of items in forked processes, which live as long as this object.

    The object cannot be used again after an error, nor after the end of the thread that made it. The function
    must not use what does not survive a fork (CUDA, threads); tokenizers are told to use no threads.

    Args:
        function: applied to each item, in one of the processes.
        processes: their number.
        bounded: limit time and memory; code of our own, which ends, needs as much as a row takes.

    Raises:
        TrainingError: a process cannot be started.
    """

    def __init__(
        self, function: Callable[[_Item], _Result], processes: int = 1, *, bounded: bool = True
    ) -> None:
        self._ahead = _LISTS_AHEAD * processes
        self._places = np.frombuffer(mmap.mmap(-1, 24 * self._ahead), np.int64).reshape(-1, 3)
        """int64 [L, 3]: of each list the process that works on it, the index of the item, and the step."""
        others = set(active_children())
        # A fork takes a moment, needs no guarded __main__, and the function need not be pickled.
        self._pool = ProcessPoolExecutor(
            processes, get_context("fork"), _begin, (function, self._places, bounded)
        )
        before = os.environ.get(_PARALLEL_TOKENIZERS)
        os.environ[_PARALLEL_TOKENIZERS] = "false"
        try:
            # A collection in a child would end garbage of the parent, and wait for threads that it has not.
            with without_collections():
                self._pool.submit(int)  # the first call forks all processes
        except OSError as error:
            raise TrainingError(
                f"no process can be started for the rows: {error.strerror}; leave more memory free, or "
                "raise the limit of processes (ulimit -u)"
            ) from error
        finally:
            del os.environ[_PARALLEL_TOKENIZERS]
            os.environ |= {} if before is None else {_PARALLEL_TOKENIZERS: before}
            self._processes = set(active_children()) - others
            self._end = weakref.finalize(self, _end, self._pool, self._processes)

    def __call__(self, lists: Iterable[list[_Item]]) -> Iterator[tuple[list[_Item], list[_Result]]]:
        """Each list with its results, in order. Meanwhile the processes work on the lists after it.

        Of several errors the one of the first list is raised, after the results of all lists before it. An
        error of `lists` itself counts as one of the list that it should have given.

        Raises:
            ChildEndedError: an item took too much time or memory, or crashed the interpreter.
            Exception: the function or `lists` raised it.
        """
        pending: deque[_Pending] = deque()
        for submitted in self._submitted(lists):
            pending.append(submitted)
            while pending and (len(pending) == self._ahead or pending[0].results.done()):
                yield self._first(pending)
        while pending:
            yield self._first(pending)

    def _submitted(self, lists: Iterable[list[_Item]]) -> Iterator[_Pending]:
        """The lists, as the pool gets them; the last one may be a failure of `lists` or of the pool."""
        number = 0
        items: list[_Item] = []
        try:
            for number, items in enumerate(lists):
                self._places[number % self._ahead] = 0
                yield _Pending(number, items, self._pool.submit(_results, number % self._ahead, items))
        except Exception as error:  # noqa: BLE001 - it is raised when its turn comes
            failed: Future[list[_Result]] = Future()
            failed.set_exception(error)
            yield _Pending(number, items, failed)

    def _first(self, pending: deque[_Pending]) -> tuple[list[_Item], list[_Result]]:
        """Take the first list, when its results are there."""
        try:
            results = pending[0].results.result()
        except BrokenProcessPool:
            raise self._ended(pending) from None
        except BaseException:  # such as KeyboardInterrupt: what the others do is not waited for
            self._end()
            raise
        return pending.popleft().items, results

    def _ended(self, pending: Sequence[_Pending]) -> ChildEndedError:
        """The error for the process that ended by itself; the pool ends the others by SIGTERM."""
        self._pool.shutdown()
        codes = {process.pid: process.exitcode for process in self._processes}
        codes = {pid: code for pid, code in codes.items() if code not in (0, -signal.SIGTERM)}
        item, step, code = pending[0].items[0], 0, next(iter(codes.values()), None)
        for number, items, results in pending:
            pid, index, at_step = self._places[number % self._ahead].tolist()
            if pid in codes and isinstance(results.exception(), BrokenProcessPool):
                item, step, code = items[index], at_step, codes[pid]
        if code == -signal.SIGXCPU:
            return ChildEndedError(item, step, f"takes more than {SECONDS} s")
        return ChildEndedError(item, step, f"has ended its process ({code})", code == -signal.SIGKILL)


@contextmanager
def without_collections() -> Iterator[None]:
    """A context in which the garbage collector rests, in processes that are forked in it too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _end(pool: ProcessPoolExecutor, processes: Iterable[BaseProcess]) -> None:
    """End the processes whatever they do."""
    for process in processes:
        process.kill()
    pool.shutdown()


_function: Callable[[Any], Any]
"""What this process applies to each item, if it is one of a pool's."""
_is_bounded: bool
_places: np.ndarray
_place: np.ndarray | None = None
"""int64 [3]: see `BoundedMap`; None outside a pool."""


def _begin(function: Callable[[Any], Any], places: np.ndarray, bounded: bool) -> None:
    """Prepare a process of a pool."""
    global _function, _places, _is_bounded
    _function, _places, _is_bounded = function, places, bounded
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent dies, its locks and ports must not stay open until this one ends. Pipes are the pool's.
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if descriptor > 2 and not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
                os.close(descriptor)
        except OSError:
            pass  # that of the list itself
    gc.freeze()  # a collection would also write to the parent's memory pages, and thereby copy them
    gc.enable()
    for number in (signal.SIGXCPU, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers it, and ends the pool
    _limit(resource.RLIMIT_CORE, 0)
    if bounded:
        _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + BYTES)


def _results(number: int, items: list[Any]) -> list[Any]:
    """The results of a list, in a process of a pool."""
    global _place
    _place = _places[number]
    results = []
    for index, item in enumerate(items):
        _place[:] = os.getpid(), index, -1
        next_step()
        try:
            results.append(_function(item))
        except MemoryError:
            reason = f"needs more than {BYTES >> 30} GiB of memory"
            raise ChildEndedError(item, int(_place[2]), reason) from None
    return results


def next_step() -> None:
    """Begin the next step of an item, in a process of a pool: it gets `SECONDS` of its own."""
    if _place is not None:
        _place[2] += 1
        if _is_bounded:
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS)


def _limit(kind: int, amount: int) -> None:
    """Set a resource limit of this process, at most the user's own hard limit."""
    _, hard = resource.getrlimit(kind)
    soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (soft, hard))
