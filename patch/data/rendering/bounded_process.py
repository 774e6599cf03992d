"""A pool of processes that run foreign code, such as a chat template, with bounded CPU time and memory.

Jinja's sandbox bounds neither, and a signal handler cannot interrupt an operation that does not return to the
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
from multiprocessing import RawArray, active_children, get_context
from typing import Any

import psutil

from patch.errors import TrainingError

SECONDS = 15
"""CPU time for one item; a normal item takes milliseconds."""
BYTES = 2 << 30
"""Memory in addition to what the parent has when it forks."""


class ChildEndedError(Exception):
    """A process of a pool ended while it worked on one item.

    Args:
        item: what it worked on.
        code: the exit code of the process.
    """

    def __init__(self, item: Any, code: int | None) -> None:
        takes_long = code == -signal.SIGXCPU
        super().__init__(f"takes more than {SECONDS} s" if takes_long else f"has ended its process ({code})")
        self.item, self.was_killed = item, code == -signal.SIGKILL


class BoundedMap:
    """Applies a function to lists of items in forked processes, which live as long as this object.

    The object cannot be used again after an error, nor after the end of the thread that made it. The function
    must not use what does not survive a fork (CUDA, threads).

    Args:
        function: applied to each item, in one of the processes.
        processes: their number.
        bounded: limit time and memory; code of our own, which ends, needs as much as a row takes.

    Raises:
        TrainingError: a process cannot be started.
    """

    def __init__(self, function: Callable[[Any], Any], processes: int = 1, bounded: bool = True) -> None:
        self._ahead, others = 3 * processes, set(active_children())
        self._slots = RawArray("q", self._ahead)
        """For each list in work: the process, in the upper 32 bits, and the index of its item."""
        initial = (function, self._slots, bounded)
        self._pool = ProcessPoolExecutor(processes, get_context("fork"), _begin, initial)
        was_frozen = gc.get_freeze_count() > 0  # by `quick_start`
        gc.freeze()  # a child must not end garbage of the parent, and wait for threads that it does not have
        try:
            self._pool.submit(int)  # the first call forks all processes
        except OSError as error:
            for process in set(active_children()) - others:
                process.kill()  # without a pool the end of this program would wait for them
            what = f"no process can be started for the rows: {error.strerror}"
            raise TrainingError(f"{what}; free memory or raise ulimit -u") from error
        finally:
            if not was_frozen:
                gc.unfreeze()
        self._processes = set(active_children()) - others

    def __call__(self, lists: Iterable[list[Any]]) -> Iterator[tuple[list[Any], list[Any]]]:
        """Each list with its results, in order. Meanwhile the processes work on the lists after it.

        Raises:
            ChildEndedError: an item took too much time, or crashed the interpreter.
            Exception: the function or `lists` raised it.
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
            raise self._ended(pending, items[0]) from None
        except (KeyboardInterrupt, SystemExit):
            for process in self._processes:
                process.kill()  # otherwise the end of this program waits for the lists in work
            raise
        except Exception:
            # The error's traceback keeps the pool alive; a multiprocessing child would wait for it at exit.
            self._pool.shutdown(wait=False, cancel_futures=True)
            raise

    def _ended(self, pending: Iterable[Any], item: Any) -> ChildEndedError:
        """The error for the process that ended by itself; the pool ends the others by SIGTERM."""
        self._pool.shutdown()
        codes = {p.pid: p.exitcode for p in self._processes if p.exitcode not in (0, -signal.SIGTERM)}
        for items, slot, results in pending:
            pid, index = divmod(self._slots[slot], 1 << 32)
            if pid in codes and results.exception() is not None:
                return ChildEndedError(items[index], codes[pid])
        return ChildEndedError(item, next(iter(codes.values()), None))


_work: tuple[Callable[[Any], Any], Any, bool]
"""The function for each item, the slots, and whether it is bounded, in a process of a pool."""


def _begin(*work: Any) -> None:
    """Prepare a process of a pool."""
    global _work
    _work = work
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent answers it
    _limit(resource.RLIMIT_CORE, 0)
    if work[2]:
        _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + BYTES)


def _results(slot: int, items: list[Any]) -> list[Any]:
    """The results of a list, in a process of a pool."""
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
