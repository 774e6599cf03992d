"""Locks a folder for one writer at a time; a second writer is refused, with a message that names the first.

A dead owner's lock is taken over: at once if it died on this machine, and otherwise, or on a file system
without locks, after it was silent for a while (`lock_file.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from patch.errors import CheckpointError, ConfigError, ConversionError, DataError, PatchError
from patch.logger import get_logger
from patch.storage import lock_file, remote_lock
from patch.storage.lock_file import HeldLock, Owner, Watch
from patch.storage.places import AnyPath, is_in
from patch.storage.remote import RemotePath
from patch.storage.remote_lock import RemoteLock

_logger = get_logger(__name__)

_RUN_LOCK = ".lock"
_WAIT_S = 3.0
_WAIT_FOR_DYING_S = 60.0
"""A killed process keeps its lock until the kernel has freed its memory, so it is given more time."""
_POLL_S = 0.05
_NAME_OWNER_EVERY_S = 60.0
"""For those who wait as long as it takes: how often the log says for whom."""


class _Request(NamedTuple):
    """A lock to take, and the errors to raise if another process has it, or takes it over."""

    path: AnyPath
    folder: AnyPath
    error: type[PatchError]
    cure: str
    field: str | None
    """The configuration field that names the folder, for the error."""
    waits: bool = False
    """Whether to wait for the lock's owner as long as it takes."""
    lost: type[PatchError] = ConversionError
    """The error if another process takes it over."""


_held: list[tuple[_Request, HeldLock | RemoteLock]] = []
"""The locks of this process, for `check_held`."""


def _run(output: Path) -> _Request:
    cure = "wait for that run, end it, or give another folder"
    return _Request(output / _RUN_LOCK, output, ConfigError, cure, "output_path", lost=CheckpointError)


@contextmanager
def hold_run(output: Path) -> Iterator[None]:
    """Lock a run's folder against other runs; the folder is created if it is missing.

    Raises:
        ConfigError: another run has the lock; the message names its process, host and start.
    """
    with _hold(_run(output)):
        yield


@contextmanager
def hold_store(root: RemotePath) -> Iterator[None]:
    """Lock a folder of checkpoints in a store against runs with other folders.

    Raises:
        ConfigError: another run has the lock, or the store refuses to be written.
    """
    cure = "wait for that run, end it, or give another URL"
    with _hold(_Request(root / _RUN_LOCK, root, ConfigError, cure, "save", lost=CheckpointError)):
        yield


def refuse_held_run(output: Path) -> None:
    """Raise the error that `hold_run` would raise, without keeping the lock or creating the folder.

    Raises:
        ConfigError: another run has the lock.
    """
    if (output / _RUN_LOCK).exists():
        with hold_run(output):
            pass


@contextmanager
def hold_target(target: Path) -> Iterator[None]:
    """Lock the target folder of a conversion against other conversions; the lock file is beside the folder.

    Raises:
        ConversionError: another conversion has the lock; the message names its process, host and start.
    """
    cure = "wait for that conversion, or give another folder (--save)"
    path = target.with_name(f".{target.name}.lock")
    with _hold(_Request(path, target, ConversionError, cure, None)):
        yield


@contextmanager
def wait_for_cache(entry: Path) -> Iterator[None]:
    """Wait until no other process makes this entry of a cache, and lock it; the lock file is beside it.

    Raises:
        DataError: the lock file cannot be written.
    """
    cure = "expected a cache folder that can be written"
    path = entry.with_name(f".{entry.name}.lock")
    with _hold(_Request(path, entry, DataError, cure, "cache_dir", waits=True, lost=DataError)):
        yield


@contextmanager
def _hold(request: _Request) -> Iterator[None]:
    try:
        lock = _lock(request)
    except OSError as error:
        cure = "expected a folder that can be written: make room there, or give another one"
        message = f"{request.path} cannot be written: {error.strerror}; {cure}"
        raise request.error(message, field=request.field) from error
    held = (request, lock)
    _held.append(held)
    try:
        yield
    finally:
        _held.remove(held)
        lock.release()


def check_held(path: AnyPath) -> None:
    """Call before a finished file or folder gets its name: is the lock that covers it still ours?

    It may not be if this process stood still for minutes (a stopped process, a suspended machine, a network
    that was away) and another one took it for dead. Does nothing if this process has no lock for `path`.

    Args:
        path: a folder that this process has locked, or something in it.

    Raises:
        CheckpointError, ConversionError, DataError: another process has taken the lock over; write nothing.
    """
    for request, lock in _held:
        if is_in(path, request.folder) and (thief := lock.thief()):
            raise request.lost(
                f"{path} was not written: {request.folder} now belongs to {thief}, which took this process "
                "for dead, because it had stood still for minutes",
                field=request.field,
            )


def _try_to_take(path: AnyPath, watch: Watch) -> HeldLock | RemoteLock | Owner:
    if isinstance(path, RemotePath):
        return remote_lock.try_to_take(path, watch)
    return lock_file.try_to_take(path, watch)


def _lock(request: _Request) -> HeldLock | RemoteLock:
    """Wait for the lock, and take it."""
    if isinstance(request.path, Path):
        request.path.parent.mkdir(parents=True, exist_ok=True)
    watch, begin = Watch(), time.monotonic()
    told = begin - _NAME_OWNER_EVERY_S + 1
    while isinstance(taken := _try_to_take(request.path, watch), Owner):
        name = taken.text or "another process"
        is_alive = watch.is_renewed or (taken.is_flocked and taken.is_local)
        patience = _WAIT_FOR_DYING_S if taken.is_dying else _WAIT_S
        if not request.waits and is_alive and time.monotonic() - begin > patience:
            message = f"{request.folder} is being written by {name}: {request.cure}"
            raise request.error(message, field=request.field)
        if (request.waits or not is_alive) and time.monotonic() - told > _NAME_OWNER_EVERY_S:
            told = time.monotonic()
            what = "which makes" if request.waits else "or for signs of its death: it locks"
            _logger.info("waiting for %s, %s %s", name, what, request.folder)
        time.sleep(_POLL_S if time.monotonic() - begin < _WAIT_S else 10 * _POLL_S)
    return taken
