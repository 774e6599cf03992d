"""A lock file: taking it, renewing it, and seeing that its owner is dead.

Where the file system has flock, the kernel releases the lock with the owner's process. Elsewhere (on some
network and FUSE file systems) the owner is who created the file, which happens atomically. In both cases the
owner writes to the file every few seconds, because flock cannot tell of a machine that died (NFS), and on
some mounts holds on one machine only. A file that nobody renews is replaced atomically; its owner, if it was
only slow, notices by `thief`.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from patch.device import start_thread
from patch.logger import get_logger

_logger = get_logger(__name__)

BEAT_S = 10.0
"""How often an owner renews its lock."""
_SILENT_BEATS = 3
STALE_S = 180.0
"""An owner on another machine that has not renewed its lock for so long is dead."""
SETTLE_S = 2.0
"""Two who replace a dead owner's file do so within this time after they looked at it; the last one wins."""


class Owner(NamedTuple):
    """The owner of a lock, as its file describes it."""

    text: str
    """Process, host and start, for messages."""
    token: str
    """Unique for each taking of the lock."""
    renewed: float
    """The file's time stamp, in seconds, by the clock of its file system."""
    is_flocked: bool | None
    """Whether it has the kernel's lock; None: the file system has none."""

    @property
    def is_local(self) -> bool:
        """Whether it is on this machine."""
        return self._named()[1:] == (socket.gethostname(),)

    @property
    def is_dying(self) -> bool:
        """Whether it is a process of this machine that has ended or already freed its memory."""
        process, *_ = self._named()
        if not self.is_local:
            return False
        try:
            return Path("/proc", process, "statm").read_text().startswith("0 ")
        except OSError:
            return True

    def _named(self) -> tuple[str, ...]:
        named = re.match(r"process (\d+) on (\S+) ", self.text)
        return (named[1], named[2]) if named else ("",)


class Watch:
    """Observes the owner of a lock that somebody waits for."""

    def __init__(self) -> None:
        self._last: Owner | None = None
        self._since = time.monotonic()
        self.is_renewed = False
        """Whether the owner renewed its lock under our eyes."""

    def see(self, owner: Owner) -> None:
        """Note what the file says now."""
        last = self._last
        if last is None or (last.token, last.renewed) != (owner.token, owner.renewed):
            self.is_renewed = last is not None and last.token == owner.token
            self._last, self._since = owner, time.monotonic()

    def is_silent(self) -> bool:
        """Whether the owner has left out several renewals under our eyes."""
        return self._last is not None and self._silent_s() >= _SILENT_BEATS * BEAT_S

    def is_dead(self) -> bool:
        """Whether the owner is dead: silent for long, also if its clock is not ours."""
        owner = self._last
        if owner is None or not self.is_silent() or (owner.is_flocked and owner.is_local):
            return False
        if owner.is_dying:
            return True
        return max(self._silent_s(), time.time() - owner.renewed) >= STALE_S

    def _silent_s(self) -> float:
        return time.monotonic() - self._since


class HeldLock:
    """A lock that this process has; a thread renews it until `release`.

    Args:
        path: the lock file.
        descriptor: the open file, with the kernel's lock if there is one; closed by `release`.
        content: what the file says: the owner's description and its token.
    """

    def __init__(self, path: Path, descriptor: int, content: bytes) -> None:
        self.path, self._descriptor, self._content = path, descriptor, content
        self._ended = threading.Event()
        self._thread = start_thread("lock renewal", self._renew)

    def thief(self) -> str | None:
        """Who has replaced this lock; None if it is still ours. A file that somebody removed is no theft."""
        content = _content(self.path)
        return _lines(content)[0] if content not in (b"", self._content) else None

    def release(self) -> None:
        """Give up the lock. The file goes before the kernel's lock, so that those who wait see it."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            if self.thief() is None:
                self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _renew(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(OSError):  # a full disk or a network that is away for a while
                if (thief := self.thief()) is not None:
                    _logger.error("%s now belongs to %s, which took this process for dead", self.path, thief)
                    return
                os.pwrite(self._descriptor, self._content, 0)
                os.fsync(self._descriptor)  # over NFS the others see the time stamp only then


def try_to_take(path: Path, watch: Watch) -> HeldLock | Owner:
    """Take a lock if it is free or its owner is dead.

    Args:
        path: the lock file.
        watch: what was seen of its owner so far.

    Returns:
        The lock, or its owner.

    Raises:
        OSError: the file cannot be read or written.
    """
    is_new, descriptor = _open(path)
    try:
        is_locked = _flock(descriptor)
        owner = _owner(descriptor, is_flocked=None if is_locked is None else not is_locked)
        watch.see(owner)
        if is_locked is not False and _is_at_path(descriptor, path):
            # The kernel's lock alone is no proof where another machine may not see it.
            is_free = is_new or (is_locked and (not owner.text or owner.is_local or watch.is_silent()))
            if is_free:
                content = describe_self()
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, content, 0)
                return HeldLock(path, descriptor, content)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return _replace(path, owner) if watch.is_dead() else owner


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


def _replace(path: Path, dead: Owner) -> HeldLock | Owner:
    """Replace a dead owner's file; of several who do so at once, one ends with the lock."""
    _logger.warning("%s was left by %s, which is dead; it is taken over", path, dead.text)
    content = describe_self()
    draft = path.with_name(f"{path.name}.{_lines(content)[1]}")
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _flock(descriptor)
        os.pwrite(descriptor, content, 0)
        if _lines(_content(path))[1] == dead.token:
            draft.replace(path)
            time.sleep(SETTLE_S)
        if content == _content(path):
            return HeldLock(path, descriptor, content)
    except BaseException:
        os.close(descriptor)
        raise
    finally:
        draft.unlink(missing_ok=True)
    os.close(descriptor)
    return dead


def _owner(descriptor: int, *, is_flocked: bool | None) -> Owner:
    text, token = _lines(os.pread(descriptor, 1000, 0))
    return Owner(text, token, os.fstat(descriptor).st_mtime, is_flocked)


def _content(path: Path) -> bytes:
    """What the file says; nothing if there is none."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _lines(content: bytes) -> tuple[str, str]:
    """The owner's description and its token; empty where the file was not written yet."""
    text, token, *_ = [*content.decode(errors="replace").splitlines(), "", ""]
    return text, token


def _is_at_path(descriptor: int, path: Path) -> bool:
    """Whether the open file is still the one at `path`; its last owner may have removed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def describe_self() -> bytes:
    """Two lines: process, host and start of this owner, and a token that is unique for each taking."""
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    token = secrets.token_hex(8)
    return f"process {os.getpid()} on {socket.gethostname()} since {since}\n{token}\n".encode()
