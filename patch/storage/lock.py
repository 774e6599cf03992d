"""Locks a folder for one writer at a time; a second writer is refused, with a message that names the first.

On a disk the lock is a file. Where the file system has flock, the kernel releases it with the owner's
process, also after `kill -9`; elsewhere (some network and FUSE file systems) the owner is who created the
file, which happens atomically. In a store it is an object, created exclusively where driver and store can.

Everywhere the owner renews it every few seconds. An owner on this machine is dead when its process is gone,
one elsewhere when it was silent for long: flock cannot tell of a machine that died (NFS), and on some mounts
holds on one machine only. A dead owner's lock is replaced; of several who do so at once the last one wins. An
owner that was only slow notices by `check_held`, before it publishes anything.

PyPI's filelock (4.2) was tried. Its SoftReadWriteLock keeps the lock of a killed process for the whole time
of silence, needs hard links and leaves a folder behind; its SoftFileLease does the first for a killed process
whose parent has not yet asked for its end; both take the lock of a process that a user has stopped (Ctrl-Z).
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from patch.device import start_thread
from patch.errors import CheckpointError, ConfigError, ConversionError, DataError, PatchError
from patch.logger import get_logger
from patch.storage.places import AnyPath, is_in
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_small

_logger = get_logger(__name__)

_RUN_LOCK = ".lock"
_WAIT_S = 3.0
_WAIT_FOR_DYING_S = 60.0
"""A killed process keeps its lock until the kernel has freed its memory, so it is given more time."""
_POLL_S = 0.05
_NAME_OWNER_EVERY_S = 60.0
"""For those who wait as long as it takes: how often the log says for whom."""
_BEAT_S = 10.0
"""How often an owner renews its lock."""
_SILENT_BEATS = 3
_STALE_S = 180.0
"""An owner on another machine that has not renewed its lock for so long is dead."""
_SETTLE_S = 2.0
"""Two who replace a dead owner's lock do so within this time after they looked at it; the last one wins."""
_RELEASE_S = 1.0
"""How long the end of a run waits for a store that fails."""


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


def hold_run(root: AnyPath) -> AbstractContextManager[None]:
    """Lock a run's folder, or its folder of checkpoints in a store, against other runs.

    A folder is created if it is missing.

    Raises:
        ConfigError: another run has the lock; the message names its process, host and start. Or it cannot be
            written.
    """
    what, field = ("URL", "save") if isinstance(root, RemotePath) else ("folder", "output_path")
    cure = f"wait for that run, end it, or give another {what}"
    return _hold(_Request(root / _RUN_LOCK, root, ConfigError, cure, field, lost=CheckpointError))


def refuse_held_run(output: Path) -> None:
    """Raise the error that `hold_run` would raise, without keeping the lock or creating the folder.

    Raises:
        ConfigError: another run has the lock.
    """
    if (output / _RUN_LOCK).exists():
        with hold_run(output):
            pass


def hold_target(target: Path) -> AbstractContextManager[None]:
    """Lock the target folder of a conversion against other conversions; the lock file is beside the folder.

    Raises:
        ConversionError: another conversion has the lock; the message names its process, host and start.
    """
    cure = "wait for that conversion, or give another folder (--save)"
    path = target.with_name(f".{target.name}.lock")
    return _hold(_Request(path, target, ConversionError, cure, None))


def wait_for_cache(entry: Path) -> AbstractContextManager[None]:
    """Wait until no other process makes this entry of a cache, and lock it; the lock file is beside it.

    Raises:
        DataError: the lock file cannot be written.
    """
    cure = "expected a cache folder that can be written"
    path = entry.with_name(f".{entry.name}.lock")
    return _hold(_Request(path, entry, DataError, cure, "cache_dir", waits=True, lost=DataError))


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


def _lock(request: _Request) -> _HeldLock:
    """Wait for the lock, and take it."""
    path, watch, begin = request.path, _Watch(), time.monotonic()
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    told = begin - _NAME_OWNER_EVERY_S + 1
    while True:
        taken = _take_file(path, watch) if isinstance(path, Path) else _take_object(path, watch)
        if isinstance(taken, _HeldLock):
            return taken
        name = taken.text or "another process"
        is_alive = watch.is_renewed or taken.is_local
        patience = _WAIT_FOR_DYING_S if taken.is_gone else _WAIT_S
        if not request.waits and is_alive and time.monotonic() - begin > patience:
            message = f"{request.folder} is being written by {name}: {request.cure}"
            raise request.error(message, field=request.field)
        if (request.waits or not is_alive) and time.monotonic() - told > _NAME_OWNER_EVERY_S:
            told = time.monotonic()
            what = "which makes" if request.waits else "or for signs of its death: it locks"
            _logger.info("waiting for %s, %s %s", name, what, request.folder)
        time.sleep(_POLL_S if time.monotonic() - begin < _WAIT_S else 10 * _POLL_S)


# The owner.


class _Owner(NamedTuple):
    """The owner of a lock, as its file or object describes it."""

    text: str
    """Process, host and start, for messages."""
    token: str
    """Unique for each taking of the lock; empty where nothing was written yet."""
    identity: str
    """See `_identity`."""
    renewed: float
    """The time of its last renewal in seconds: by the clock of the file system, in a store by the owner's."""
    is_flocked: bool | None = None
    """Whether it has the kernel's lock; None: there is no such lock."""

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine, and its process number means something here."""
        return self.identity.split()[:3] == _identity(0).split()[:3]

    @property
    def is_gone(self) -> bool:
        """Whether it is a process of this machine that has ended or already freed its memory."""
        process = [*self.identity.split(), *"0000"][3]
        return self.is_local and self.identity != _identity(int(process) if process.isdecimal() else 0)


def _parsed(content: bytes) -> _Owner:
    """The owner that a file or an object names."""
    lines = [*content.decode(errors="replace").splitlines(), "", "", "", ""]
    text, token, identity, renewed = lines[:4]
    return _Owner(text, token, identity, float(renewed) if renewed.replace(".", "").isdecimal() else 0.0)


def _at(path: AnyPath) -> _Owner:
    """The owner that the lock at `path` names."""
    with suppress(FileNotFoundError):
        return _parsed(path.read_bytes() if isinstance(path, RemotePath) else read_small(path))
    return _parsed(b"")


def _describe_self() -> bytes:
    """Three lines: process, host and start of this owner, a token, and its identity."""
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    text = f"process {os.getpid()} on {socket.gethostname()} since {since}"
    return f"{text}\n{secrets.token_hex(8)}\n{_identity(os.getpid())}\n".encode()


def _identity(process: int) -> str:
    """A process: host, start of the machine, container, its number, its start; 0 if it is gone or dying."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
    except OSError:  # a sandbox that hides them
        boot = space = "-"
    begun = "0"
    with suppress(OSError):
        if not Path(f"/proc/{process}/statm").read_text().startswith("0 "):
            begun = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()} {boot} {space} {process} {begun}"


class _Watch:
    """Observes the owner of a lock that somebody waits for."""

    def __init__(self) -> None:
        self._last: _Owner | None = None
        self._since = time.monotonic()
        self.is_renewed = False
        """Whether the owner renewed its lock under our eyes."""

    def see(self, owner: _Owner) -> None:
        """Note what the lock says now."""
        last = self._last
        if last is None or (last.token, last.renewed) != (owner.token, owner.renewed):
            self.is_renewed = last is not None and last.token == owner.token
            self._last, self._since = owner, time.monotonic()

    @property
    def silent_s(self) -> float:
        """For how long the owner has not renewed its lock under our eyes."""
        return time.monotonic() - self._since

    def is_silent(self) -> bool:
        """Whether the owner has left out several renewals under our eyes."""
        return self.silent_s >= _SILENT_BEATS * _BEAT_S

    def is_dead(self, owner: _Owner) -> bool:
        """Whether the owner, which was seen last, is dead; also if its clock is not ours."""
        if owner.is_local:
            return owner.is_gone and not owner.is_flocked
        return self.is_silent() and max(self.silent_s, time.time() - owner.renewed) >= _STALE_S


# The lock.


class _HeldLock:
    """A lock that this process has; a thread renews it until `release`.

    Args:
        path: the lock's file or object.
        content: what it says of this owner.
        descriptor: of the open file, with the kernel's lock if there is one; closed by `release`.
    """

    def __init__(self, path: AnyPath, content: bytes, descriptor: int | None = None) -> None:
        self.path, self._content, self._descriptor = path, content, descriptor
        self._token = _parsed(content).token
        self._ended = threading.Event()
        self._is_away = False
        """Whether the last renewal has failed."""
        self._thread = start_thread("lock renewal", self._renew)

    def thief(self, path: AnyPath | None = None) -> str | None:
        """Who has replaced this lock; None if it is still ours. One that somebody removed is no theft.

        Args:
            path: the lock, with another patience.

        Raises:
            OSError: the file system or the store does not answer.
        """
        owner = _at(self.path if path is None else path)
        return owner.text if owner.token not in ("", self._token) else None

    def release(self) -> None:
        """Give up the lock. The file goes before the kernel's lock, so that those who wait see it.

        In a store that is away it stays; the next run sees that its owner is dead.
        """
        self._ended.set()
        self._thread.join(_RELEASE_S if self._descriptor is None else None)
        if self._descriptor is not None or not (self._is_away or self._thread.is_alive()):
            with suppress(OSError):
                path = _patient(self.path, _RELEASE_S)
                if _at(path).token == self._token:
                    path.unlink(missing_ok=True)
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _renew(self) -> None:
        path = _patient(self.path, 0)
        while not self._ended.wait(_BEAT_S):
            try:
                if (thief := self.thief(path)) is not None:
                    _logger.error("%s now belongs to %s, which took this process for dead", self.path, thief)
                    return
                if self._descriptor is None:
                    path.write_bytes(_signed(self._content))
                else:
                    os.pwrite(self._descriptor, self._content, 0)
                    os.fsync(self._descriptor)  # over NFS the others see the time stamp only then
                self._is_away = False
            except OSError:  # a full disk, or a store or a network that is away for a while
                self._is_away = True


_held: list[tuple[_Request, _HeldLock]] = []
"""The locks of this process, for `check_held`."""


def _patient(path: AnyPath, seconds: float) -> AnyPath:
    """The same path, whose failing requests to a store are tried again for so long."""
    return path.with_patience(seconds) if isinstance(path, RemotePath) else path


# Taking it. Each returns the lock, or its owner, and raises OSError if it cannot be read or written.


def _take_object(path: RemotePath, watch: _Watch) -> _HeldLock | _Owner:
    """Take a lock in a store if it is free or its owner is dead. Who writes looks again after a moment."""
    owner, content = _at(path), _describe_self()
    watch.see(owner)
    if not (owner.token or watch.is_silent()):
        with suppress(FileExistsError):
            path.create_bytes(_signed(content))
    elif not owner.token or watch.is_dead(owner):
        _warn_of_takeover(path, owner)
        path.write_bytes(_signed(content))
    else:
        return owner
    time.sleep(_SETTLE_S)
    now = _at(path)
    return _HeldLock(path, content) if now.token == _parsed(content).token else now


def _signed(content: bytes) -> bytes:
    """An object's content with the time of this renewal."""
    return content + f"{time.time():.3f}\n".encode()


def _take_file(path: Path, watch: _Watch) -> _HeldLock | _Owner:
    """Take a lock on a disk if it is free or its owner is dead."""
    is_new, descriptor = _open(path)
    try:
        is_locked = _flock(descriptor)
        owner = _parsed(os.pread(descriptor, 1000, 0))._replace(
            renewed=os.fstat(descriptor).st_mtime, is_flocked=None if is_locked is None else not is_locked
        )
        watch.see(owner)
        if is_locked is not False and _is_at_path(descriptor, path):
            # The kernel's lock alone is no proof where another machine may not see it.
            is_free = is_new or (is_locked and (not owner.text or owner.is_local or watch.is_silent()))
            if is_free:
                content = _describe_self()
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, content, 0)
                return _HeldLock(path, content, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return _replace(path, owner) if watch.is_dead(owner) else owner


def _open(path: Path) -> tuple[bool, int]:
    """Whether the file was created, and its descriptor."""
    while True:
        with suppress(FileExistsError):
            return True, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        with suppress(FileNotFoundError):
            return False, os.open(path, os.O_RDWR)


def _flock(descriptor: int) -> bool | None:
    """Try to take the kernel's lock; whether it was free, or None if this file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _replace(path: Path, dead: _Owner) -> _HeldLock | _Owner:
    """Replace a dead owner's file; of several who do so at once, one ends with the lock."""
    _warn_of_takeover(path, dead)
    content = _describe_self()
    token = _parsed(content).token
    draft = path.with_name(f"{path.name}.{token}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _flock(descriptor)
        os.pwrite(descriptor, content, 0)
        if _at(path).token == dead.token:
            draft.replace(path)
            time.sleep(_SETTLE_S)
        if _at(path).token == token:
            return _HeldLock(path, content, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        draft.unlink(missing_ok=True)
    os.close(descriptor)
    return dead


def _warn_of_takeover(path: AnyPath, dead: _Owner) -> None:
    _logger.warning("%s was left by %s, which is dead; it is taken over", path, dead.text)


def _is_at_path(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`; its last owner may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
