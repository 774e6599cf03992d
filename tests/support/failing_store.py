"""fsspec driver whose requests fail on demand: failing://folder, in memory."""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

_REQUESTS = ("cat_file", "find", "glob", "info", "ls", "makedirs", "open", "pipe_file", "rm", "rm_file")


class FailingFileSystem(MemoryFileSystem):
    protocol = "failing"
    cachable = False
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    answers: ClassVar[Iterator[Exception | None]] = itertools.repeat(None)
    """Result of each further request: an error to raise, or None."""

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(str(path).replace("failing://", "memory://"))

    def __getattribute__(self, name: str) -> Any:
        if name in _REQUESTS and (error := next(FailingFileSystem.answers, None)) is not None:
            raise error
        return super().__getattribute__(name)


def answer(answers: Iterable[Exception | None]) -> None:
    """Set the results of the next requests. Requests after them work."""
    FailingFileSystem.answers = iter(answers)


def die(working: int) -> None:
    """Let the store stop answering after this number of requests."""
    answer(itertools.chain([None] * working, itertools.repeat(OSError(5, "no answer"))))


@contextmanager
def failing_store(*answers: Exception | None) -> Iterator[None]:
    """Create a new store at failing://, and set the results of its first requests."""
    fsspec.register_implementation("failing", FailingFileSystem, clobber=True)
    answer(answers)
    try:
        yield
    finally:
        answer(())
        FailingFileSystem.store.clear()
        FailingFileSystem.pseudo_dirs[:] = [""]
