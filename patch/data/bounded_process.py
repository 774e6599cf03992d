"""Foreign code, such as a chat template, in a process of its own with bounded CPU time and memory.

Jinja's sandbox bounds neither, and no signal handler interrupts what does not come back to the interpreter
(10 ** 10 ** 10); the kernel bounds both. CPU time is counted, so a busy machine refuses nothing.
"""

from __future__ import annotations

import gc
import mmap
import os
import resource
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, NoReturn, TypeVar

import psutil

from patch.errors import TrainingError

SECONDS = 60
"""CPU time for one item; what a legitimate one takes is milliseconds."""
BYTES = 2 << 30
"""Memory beyond what the parent has when it forks."""
_INDEX_BYTES = 8

Item = TypeVar("Item")
Result = TypeVar("Result")


class ChildEndedError(Exception):
    """The child ended while it worked on one item."""

    def __init__(self, item: Any, reason: str) -> None:
        super().__init__(reason)
        self.item = item


class BoundedMap(Generic[Item, Result]):
    """A function that is applied to lists of items in one forked child, which lives as long as this object.

    After an error it is of no more use. The child runs Python alone: what does not survive a fork (CUDA,
    tokenizers' threads) it must not touch.

    Raises:
        TrainingError: no process can be started.
    """

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self._connection, theirs = Pipe()
        self._noted = mmap.mmap(-1, _INDEX_BYTES)
        """Shared with the child, which notes the item it works on."""
        try:
            pid = os.fork()
        except OSError as error:
            raise TrainingError(
                f"no process can be started for the chat template: {error.strerror}; leave more memory "
                "free, or raise the limit of processes (ulimit -u)"
            ) from error
        if pid == 0:
            self._connection.close()  # so that the child hears when the parent ends
            _serve(function, theirs, self._noted)
        theirs.close()
        self._end = weakref.finalize(self, _end, pid, self._connection)

    def __call__(self, lists: Iterable[list[Item]]) -> Iterator[tuple[list[Item], list[Result]]]:
        """Each list with its results, in order; the child works on the next one while the caller has these.

        Raises:
            ChildEndedError: an item took too much time or memory, or crashed the interpreter.
            Exception: what the function raised.
        """
        before: list[Item] | None = None
        for items in lists:
            results = None if before is None else self._receive(before)
            self._send(items)  # the child waits for it, so neither side fills a pipe that the other one fills
            if before is not None and results is not None:
                yield before, results
            before = items
        if before is not None:
            yield before, self._receive(before)

    def _send(self, items: list[Item]) -> None:
        try:
            self._connection.send(items)
        except OSError:
            raise ChildEndedError(items[0], self._reason()) from None

    def _receive(self, items: list[Item]) -> list[Result]:
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise ChildEndedError(items[self._index()], self._reason()) from None
        if isinstance(answer, MemoryError):
            raise ChildEndedError(items[self._index()], f"needs more than {BYTES >> 30} GiB of memory")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _reason(self) -> str:
        code = self._end()
        if code == -signal.SIGXCPU:
            return f"takes more than {SECONDS} s"
        return f"has ended its process ({code})"

    def _index(self) -> int:
        return int.from_bytes(self._noted[:], "little")


def _end(pid: int, connection: Connection) -> int:
    """End and reap the child; how it ended, as `os.waitstatus_to_exitcode` says it."""
    connection.close()
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _serve(function: Callable[[Any], Any], connection: Connection, noted: mmap.mmap) -> NoReturn:
    """The child's life: lists of items in, lists of results or an exception out, until the parent closes."""
    try:
        # A lock or a port of the parent's would outlive it, as long as the item under way takes.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        gc.freeze()  # no collection writes to, and so copies, the parent's pages
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + BYTES)
        while True:
            connection.send(_results(function, connection.recv(), noted))
    finally:
        os._exit(1)  # no handler, no buffer and no thread of the parent's is this process's to end


def _results(function: Callable[[Any], Any], items: list[Any], noted: mmap.mmap) -> list[Any] | Exception:
    results = []
    for number, item in enumerate(items):
        noted[:] = number.to_bytes(_INDEX_BYTES, "little")
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS)
        try:
            results.append(function(item))
        except Exception as error:  # noqa: BLE001 - it is raised again in the parent
            return error
    return results


def _limit(kind: int, amount: int) -> None:
    """Set a limit of this process, which the user's own may have made lower already."""
    _, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))
