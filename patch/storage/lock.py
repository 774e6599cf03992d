"""One writer at a time: a folder that is being written is locked, and whoever comes second is told by whom.

The lock is the kernel's (flock) on a file that names its holder, so it ends with the process however that
dies. Over NFS it holds between machines (Linux 2.6.12 and newer); on a file system without locks a warning
says so.
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

from patch.errors import ConfigError, ConversionError, PatchError
from patch.logger import get_logger

_logger = get_logger(__name__)

_RUN_LOCK = ".lock"
_PATIENCE_S = 3.0
_DYING_S = 60.0
"""A killed process keeps its lock while the kernel takes its memory apart; only then a refusal."""
_POLL_S = 0.05


class _LockFile(NamedTuple):
    """A file that is locked for as long as a folder is written, and the words of a refusal."""

    path: Path
    folder: Path
    error: type[PatchError]
    cure: str


def _run(output: Path) -> _LockFile:
    cure = "wait for that run, end it, or give another OUTPUT_BASEPATH (position 25)"
    return _LockFile(output / _RUN_LOCK, output, ConfigError, cure)


@contextmanager
def hold_run(output: Path) -> Iterator[None]:
    """Keep other runs out of a run's folder, which is made where it is missing.

    Raises:
        ConfigError: another run holds it: host, process, since when.
    """
    with _hold(_run(output)):
        yield


def refuse_held_run(output: Path) -> None:
    """What `hold_run` would say, without holding the folder or making it.

    Raises:
        ConfigError: another run holds it.
    """
    if (output / _RUN_LOCK).exists():
        with hold_run(output):
            pass


@contextmanager
def hold_target(target: Path) -> Iterator[None]:
    """Keep other conversions away from a folder that is to appear whole; the lock lies beside it.

    Raises:
        ConversionError: another conversion writes it: host, process, since when.
    """
    cure = "wait for that conversion, or give another folder (--save)"
    path = target.with_name(f".{target.name}.lock")
    with _hold(_LockFile(path, target, ConversionError, cure)):
        yield


@contextmanager
def _hold(place: _LockFile) -> Iterator[None]:
    try:
        descriptor = _lock(place)
    except OSError as error:
        raise place.error(f"{place.path} cannot be written: {error.strerror}; {place.cure}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            place.path.unlink(missing_ok=True)  # while it is still ours: `_lock` looks whether it is there
        os.close(descriptor)


def _lock(place: _LockFile) -> int:
    """The descriptor of the locked file, which is still the one of that name."""
    place.path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    while True:
        descriptor = os.open(place.path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if _try(descriptor, place) and _is_named(descriptor, place.path):
                os.truncate(descriptor, 0)
                os.write(descriptor, _describe_self().encode())
                return descriptor
            holder = os.read(descriptor, 1000).decode(errors="replace") or "another process"
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        if time.monotonic() - begin > (_DYING_S if _is_dying(holder) else _PATIENCE_S):
            raise place.error(f"{place.folder} is being written by {holder}: {place.cure}")
        time.sleep(_POLL_S)


def _try(descriptor: int, place: _LockFile) -> bool:
    """Whether the lock is ours; on a file system without locks it counts as ours, with a warning."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        _logger.warning(
            "%s cannot be locked (%s): nothing but you keeps a second one from writing there too",
            place.folder, error.strerror,
        )  # fmt: skip
    return True


def _is_named(descriptor: int, path: Path) -> bool:
    """Whether the file still has its name: who held it before removes it."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _is_dying(holder: str) -> bool:
    """Whether the holder is a process of this machine that is gone, or has no memory any more."""
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
