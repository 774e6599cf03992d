"""Pool of processes that run foreign code, such as a chat template, with bounded CPU time and memory.

Jinja's sandbox bounds neither. A signal handler cannot interrupt an operation that does not return to the
interpreter (10 ** 10 ** 10). The kernel's limits bound both. CPU time is limited, not elapsed time, so a busy
machine causes no refusal.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import RawArray, get_context
from typing import Any

import psutil

from patch.errors import TrainingError

SECONDS = 15
"""CPU time for one item; a normal item takes milliseconds."""
BYTES = 2 << 30
"""Bytes of memory beyond what the parent has when it forks."""


class ChildEndedError(Exception):
    """A process of a pool ended while it worked on one item."""

    def __init__(self, item: Any, code: int | None) -> None:
        takes_long = code == -signal.SIGXCPU
        super().__init__(f"takes more than {SECONDS} s" if takes_long else f"has ended its process ({code})")
        self.item, self.was_killed = item, code == -signal.SIGKILL


class BoundedMap:
    """Map of a function over lists of items, in forked processes that live as long as this object.

    The object cannot be used after an error, or after the end of the thread that made it. The function must
    not use anything that does not survive a fork (CUDA, threads). Time and memory are not `bounded` for our
    own code, which ends and needs memory only for its rows.

    Args:
        error: returns the error to raise if an item took too much time, or crashed the interpreter.
    Raises:
        TrainingError: a process cannot be started.
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        processes: int = 1,
        *,
        bounded: bool = True,
        error: Callable[[ChildEndedError], Exception] = lambda ended: ended,
    ) -> None:
        self._error = error
        self._ahead = 3 * processes
        self._slots = RawArray("q", self._ahead)
        """For each list in work: the process id in the upper 32 bits, and the index of its item."""
        initial = (function, self._slots, bounded)
        self._pool = ProcessPoolExecutor(processes, get_context("fork"), _begin, initial)
        self._processes = self._pool._processes  # which the pool drops at its end
        gc.collect()  # a child must not finalize the parent's garbage, and wait for threads that it lacks
        try:
            self._pool.submit(int)  # the first call forks all processes
        except OSError as error:
            self._kill()
            what = f"no process can be started for the rows: {error.strerror}"
            raise TrainingError(f"{what}; free memory or raise ulimit -u") from error

    def _kill(self) -> None:
        for process in [*self._processes.values()]:
            process.kill()

    def __call__(self, lists: Iterable[list[Any]]) -> Iterator[tuple[list[Any], list[Any]]]:
        """Yield each list with its results, in order. The processes already work on later lists.

        Raises:
            Exception: `error` returned it, or the function or `lists` raised it.
        """
        pending: deque[Any] = deque(maxlen=self._ahead)
        try:
            for number, items in enumerate(lists):
                if number >= self._ahead:
                    yield pending[0][0], pending[0][2].result()
                slot = number % self._ahead
                self._slots[slot] = 0
                pending.append((items, slot, self._pool.submit(_results, slot, items)))
            for items, _, results in pending:
                yield items, results.result()
        except BrokenProcessPool:
            raise self._error(self._ended(pending, items[0])) from None
        except (Exception, KeyboardInterrupt, SystemExit):
            self._kill()  # otherwise the end of this program waits for the lists in work
            raise

    def _ended(self, pending: Iterable[Any], item: Any) -> ChildEndedError:
        """Return the error for the process that ended by itself. The pool ends the others by SIGTERM."""
        self._pool.shutdown()
        ended = {pid: process.exitcode for pid, process in self._processes.items()}
        codes = {pid: code for pid, code in ended.items() if code not in (0, -signal.SIGTERM)}
        for items, slot, results in pending:
            pid, index = divmod(self._slots[slot], 1 << 32)
            if pid in codes and results.exception() is not None:
                return ChildEndedError(items[index], codes[pid])
        return ChildEndedError(item, next(iter(codes.values()), None))


_work: tuple[Callable[[Any], Any], Any, bool]
"""In a process of a pool: the function for each item, the slots, and whether the function is bounded."""


def _begin(*work: Any) -> None:
    """Prepare a process of a pool."""
    global _work
    _work = work
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    _limit(resource.RLIMIT_CORE, 0)
    if work[2]:
        _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + BYTES)


def _results(slot: int, items: list[Any]) -> list[Any]:
    (function, slots, is_bounded), results = _work, []
    for index, item in enumerate(items):
        slots[slot] = os.getpid() << 32 | index
        if is_bounded:
            _limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS)
        results.append(function(item))
    return results


def _limit(kind: int, amount: int) -> None:
    """Set a resource limit of this process, at most the user's own hard limit."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))
