"""Runs foreign code, such as a chat template, in processes of its own with bounded CPU time and memory.

Jinja's sandbox bounds neither, and a signal handler cannot interrupt an operation that does not return to the
interpreter (10 ** 10 ** 10). The kernel's limits bound both. CPU time is limited, not elapsed time, so a busy
machine causes no refusal.
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
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, NoReturn, TypeVar

import psutil

from patch.errors import TrainingError

SECONDS = 15
"""CPU time for one item; a normal item takes milliseconds."""
BYTES = 2 << 30
"""Memory in addition to what the parent has when it forks."""
_INDEX_BYTES = 8
_LISTS_AHEAD = 2
"""For each child, lists whose results may wait for an earlier list's."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class ChildEndedError(Exception):
    """A child ended while it worked on one item.

    Args:
        item: what it worked on.
        reason: what it did, such as "takes more than 15 s".
        was_killed: whether it was killed from outside, so the item need not be the reason.
    """

    def __init__(self, item: Any, reason: str, was_killed: bool = False) -> None:
        super().__init__(reason)
        self.item, self.was_killed = item, was_killed


class BoundedMap(Generic[Item, Result]):
    """Applies a function to lists of items in forked children, which live as long as this object.

    The object cannot be used again after an error. The function must be plain Python: it must not use what
    does not survive a fork (CUDA, the threads of tokenizers).

    Args:
        function: applied to each item, in a child.
        processes: number of children.

    Raises:
        TrainingError: a process cannot be started.
    """

    def __init__(self, function: Callable[[Item], Result], processes: int = 1) -> None:
        self._children = [_Child(function) for _ in range(processes)]

    def __call__(self, lists: Iterable[list[Item]]) -> Iterator[tuple[list[Item], list[Result]]]:
        """Each list with its results, in order. The children work on other lists while the caller uses these.

        Of several errors the one of the first list is raised, after the results of all lists before it. An
        error of `lists` itself counts as one of the list that it should have given.

        Raises:
            ChildEndedError: an item took too much time or memory, or crashed the interpreter.
            Exception: the function or `lists` raised it.
        """
        work: _Work[Item, Result] = _Work(self._children)
        failure: Exception | None = None
        iterator = iter(lists)
        while not work.has_failed:
            try:
                items = next(iterator)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001 - it is raised below, after the lists before it
                failure = error
                break
            work.send(items)
            yield from work.ready()
        while work.is_running:
            work.receive()
            yield from work.ready()
        if failure is not None:
            raise failure


class _Work(Generic[Item, Result]):
    """The lists that the children have, and results that wait for those of earlier lists."""

    def __init__(self, children: list[_Child[Item, Result]]) -> None:
        self._free = list(children)
        self._busy: dict[Any, tuple[int, list[Item], _Child[Item, Result]]] = {}
        self._done: dict[int, tuple[list[Item], list[Result] | Exception]] = {}
        self._most_waiting = _LISTS_AHEAD * len(children)
        self._num_sent = self._num_given = 0
        self.has_failed = False
        """Whether a list ended with an error. No list is needed that comes later."""

    @property
    def is_running(self) -> bool:
        """Whether a child has a list."""
        return bool(self._busy)

    def send(self, items: list[Item]) -> None:
        """Give a list to the next child that is free."""
        while not self._free or (len(self._done) >= self._most_waiting and self._num_given not in self._done):
            self.receive()
            if self.has_failed:
                return
        child = self._free.pop()
        try:
            child.send(items)
            self._busy[child.connection] = (self._num_sent, items, child)
        except ChildEndedError as error:
            self._fail(self._num_sent, items, error)
        self._num_sent += 1

    def receive(self) -> None:
        """Wait until a child has finished its list, and take its results."""
        for connection in wait(list(self._busy)):
            number, items, child = self._busy.pop(connection)
            try:
                self._done[number] = (items, child.receive(items))
                self._free.append(child)
            except Exception as error:  # noqa: BLE001 - `ready` raises it in order
                self._fail(number, items, error)

    def _fail(self, number: int, items: list[Item], error: Exception) -> None:
        self._done[number] = (items, error)
        self.has_failed = True

    def ready(self) -> Iterator[tuple[list[Item], list[Result]]]:
        """The lists whose results are next in order.

        Raises:
            Exception: the next list has no results because of it.
        """
        while self._num_given in self._done:
            items, results = self._done.pop(self._num_given)
            self._num_given += 1
            if isinstance(results, Exception):
                raise results
            yield items, results


class _Child(Generic[Item, Result]):
    """One forked child. It gets a list only after it has answered, so the two never both wait to write."""

    def __init__(self, function: Callable[[Item], Result]) -> None:
        self.connection, child_connection = Pipe()
        self._shared_index = mmap.mmap(-1, _INDEX_BYTES)
        """The index of the item that the child works on; written by the child."""
        try:
            pid = os.fork()
        except OSError as error:
            raise TrainingError(
                f"no process can be started for the chat template: {error.strerror}; leave more memory "
                "free, or raise the limit of processes (ulimit -u)"
            ) from error
        if pid == 0:
            self.connection.close()  # so that the child's `recv` fails when the parent ends
            _serve(function, child_connection, self._shared_index)
        child_connection.close()
        self._end = weakref.finalize(self, _end, pid, self.connection)

    def send(self, items: list[Item]) -> None:
        """Give it a list.

        Raises:
            ChildEndedError: it has ended before.
        """
        try:
            self.connection.send(items)
        except OSError:
            raise self._ended(items[0]) from None

    def receive(self, items: list[Item]) -> list[Result]:
        """The results of the list that it was given.

        Raises:
            ChildEndedError: an item took too much time or memory, or crashed the interpreter.
            Exception: the function raised it.
        """
        try:
            answer = self.connection.recv()
        except (EOFError, OSError):
            raise self._ended(items[self._index()]) from None
        if isinstance(answer, MemoryError):
            raise ChildEndedError(items[self._index()], f"needs more than {BYTES >> 30} GiB of memory")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _ended(self, item: Item) -> ChildEndedError:
        code = self._end()
        if code == -signal.SIGXCPU:
            return ChildEndedError(item, f"takes more than {SECONDS} s")
        return ChildEndedError(item, f"has ended its process ({code})", was_killed=code == -signal.SIGKILL)

    def _index(self) -> int:
        return int.from_bytes(self._shared_index[:], "little")


def _end(pid: int, connection: Connection) -> int:
    """Kill and reap the child; its exit code, as `os.waitstatus_to_exitcode` returns it."""
    connection.close()
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _serve(function: Callable[[Any], Any], connection: Connection, shared_index: mmap.mmap) -> NoReturn:
    """Run the child: receive lists of items, send lists of results or an exception, until the parent closes.

    Args:
        function: applied to each item.
        connection: to the parent.
        shared_index: where the index of the current item is written.
    """
    try:
        # Close the parent's files: if it dies, its locks and ports must not stay open until the item is done.
        os.closerange(3, connection.fileno())
        os.closerange(connection.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        gc.freeze()  # a collection would write to the parent's memory pages, and thereby copy them
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_AS, psutil.Process().memory_info().vms + BYTES)
        while True:
            connection.send(_results(function, connection.recv(), shared_index))
    finally:
        os._exit(1)  # run none of the parent's exit handlers, and flush none of its buffers


def _results(
    function: Callable[[Any], Any], items: list[Any], shared_index: mmap.mmap
) -> list[Any] | Exception:
    results = []
    for index, item in enumerate(items):
        shared_index[:] = index.to_bytes(_INDEX_BYTES, "little")
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + SECONDS)
        try:
            results.append(function(item))
        except Exception as error:  # noqa: BLE001 - it is raised again in the parent
            return error
    return results


def _limit(kind: int, amount: int) -> None:
    """Set a resource limit of this process, at most the user's own hard limit."""
    _, hard = resource.getrlimit(kind)
    soft = amount if hard == resource.RLIM_INFINITY else min(amount, hard)
    resource.setrlimit(kind, (soft, hard))
