"""Locks a folder for one writer at a time; a second writer is refused, with a message that names the first.

The lock is the kernel's flock on a file that names the lock's owner, so it ends with the owner's process,
however that dies. Over NFS it works between machines (Linux 2.6.12 and newer). On a file system without locks
a warning is logged.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from patch.errors import ConfigError, ConversionError, DataError, PatchError
from patch.logger import get_logger

_logger = get_logger(__name__)

_RUN_LOCK = ".lock"
_WAIT_S = 3.0
_WAIT_FOR_DYING_S = 60.0
"""A killed process keeps its lock until the kernel has freed its memory, so it is given more time."""
_POLL_S = 0.05
_NAME_HOLDER_EVERY_S = 60.0
"""For those who wait as long as it takes: how often the log says for whom."""


class _LockFile(NamedTuple):
    """The lock file of a folder, and the error to raise if another process has the lock."""

    path: Path
    folder: Path
    error: type[PatchError]
    cure: str
    field: str | None
    """The configuration field that names the folder, for the error."""
    waits: bool = False
    """Whether to wait for the lock's owner as long as it takes."""


def _run(output: Path) -> _LockFile:
    cure = "wait for that run, end it, or give another folder"
    return _LockFile(output / _RUN_LOCK, output, ConfigError, cure, "output_path")


@contextmanager
def hold_run(output: Path) -> Iterator[None]:
    """Lock a run's folder against other runs; the folder is created if it is missing.

    Raises:
        ConfigError: another run has the lock; the message names its process, host and start.
    """
    with _hold(_run(output)):
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
    with _hold(_LockFile(path, target, ConversionError, cure, None)):
        yield


@contextmanager
def wait_for_cache(entry: Path) -> Iterator[None]:
    """Wait until no other process makes this entry of a cache, and lock it; the lock file is beside it.

    Raises:
        DataError: the lock file cannot be written.
    """
    cure = "expected a cache folder that can be written"
    path = entry.with_name(f".{entry.name}.lock")
    with _hold(_LockFile(path, entry, DataError, cure, "cache_dir", waits=True)):
        yield


@contextmanager
def _hold(lock_file: _LockFile) -> Iterator[None]:
    try:
        descriptor = _lock(lock_file)
    except OSError as error:
        message = f"{lock_file.path} cannot be written: {error.strerror}; {lock_file.cure}"
        raise lock_file.error(message, field=lock_file.field) from error
    try:
        yield
    finally:
        with suppress(OSError):
            # Remove it before the lock is released; `_lock` of another process sees that it is gone.
            lock_file.path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(lock_file: _LockFile) -> int:
    """Wait for the lock; the descriptor of the locked file."""
    lock_file.path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    told = begin - _NAME_HOLDER_EVERY_S + 1
    while True:
        descriptor = os.open(lock_file.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _try_lock(descriptor, lock_file) and _is_at_path(descriptor, lock_file.path):
                os.truncate(descriptor, 0)
                os.write(descriptor, _describe_self().encode())
                return descriptor
            holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if lock_file.waits:
            if time.monotonic() - told > _NAME_HOLDER_EVERY_S:
                told = time.monotonic()
                _logger.info("waiting for %s, which makes %s", holder, lock_file.folder)
        elif time.monotonic() - begin > (_WAIT_FOR_DYING_S if _is_dying(holder) else _WAIT_S):
            message = f"{lock_file.folder} is being written by {holder}: {lock_file.cure}"
            raise lock_file.error(message, field=lock_file.field)
        time.sleep(_POLL_S)


def _try_lock(descriptor: int, lock_file: _LockFile) -> bool:
    """Try to take the lock; whether it was free. Without file locks it counts as free, with a warning."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _logger.warning(
            "%s cannot be locked (%s): make sure yourself that nothing else writes there",
            lock_file.folder, error.strerror,
        )  # fmt: skip
    return True


def _is_at_path(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`; its last owner may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_dying(holder: str) -> bool:
    """Whether the lock's owner is a process of this machine that has ended or already freed its memory."""
    named = re.match(r"process (\d+) on (\S+) ", holder)
    if named is None or named[2] != socket.gethostname():
        return False
    try:
        return Path("/proc", named[1], "statm").read_text().startswith("0 ")
    except OSError:
        return True


def _describe_self() -> str:
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    return f"process {os.getpid()} on {socket.gethostname()} since {since}"
