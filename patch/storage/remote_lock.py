"""A lock in a store, which has neither flock nor exclusive creation: an object that its owner renews.

Whoever finds none, or a dead owner's, writes its own, waits a moment and looks again: of several who do so at
once, the last one wins. An owner whose object another one has replaced sees that by `thief`, before it
publishes anything.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path

from patch.device import start_thread
from patch.logger import get_logger
from patch.storage.lock_file import BEAT_S, SETTLE_S, Owner, Watch, describe_self
from patch.storage.remote import RemotePath

_logger = get_logger(__name__)

_RELEASE_S = 1.0
"""How long the end of a run waits for a store that fails."""


class RemoteLock:
    """A lock that this process has; a thread renews it until `release`.

    Args:
        path: the lock object.
        content: the owner's description and its token.
    """

    def __init__(self, path: RemotePath, content: bytes) -> None:
        self.path, self._content = path, content
        self._token = _owner(content).token
        self._ended = threading.Event()
        self._is_away = False
        """Whether the store did not answer the last renewal."""
        self._thread = start_thread("lock renewal", self._renew)

    def thief(self) -> str | None:
        """Who has replaced this lock; None if it is still ours. An object that somebody removed is no theft.

        Raises:
            OSError: the store does not answer.
        """
        owner = _owner(_read(self.path))
        return owner.text if owner.token not in ("", self._token) else None

    def release(self) -> None:
        """Give up the lock. In a store that is away it stays; the next run sees that its owner is dead."""
        self._ended.set()
        self._thread.join(_RELEASE_S)
        if self._is_away or self._thread.is_alive():
            return
        with suppress(OSError):
            path = self.path.with_patience(_RELEASE_S)
            if _owner(_read(path)).token == self._token:
                path.unlink(missing_ok=True)

    def _renew(self) -> None:
        once = self.path.with_patience(0)
        while not self._ended.wait(BEAT_S):
            try:
                owner = _owner(_read(once))
                if owner.token not in ("", self._token):
                    _logger.error("%s now belongs to %s, which took this run for dead", self.path, owner.text)
                    return
                once.write_bytes(_signed(self._content))
                self._is_away = False
            except OSError:
                self._is_away = True


def try_to_take(path: RemotePath, watch: Watch) -> RemoteLock | Owner:
    """Take a lock if it is free or its owner is dead.

    Args:
        path: the lock object.
        watch: what was seen of its owner so far.

    Returns:
        The lock, or its owner.

    Raises:
        OSError: the object cannot be read or written.
    """
    owner = _owner(content := _read(path))
    watch.see(owner)
    if owner.token and not _is_dead_here(content) and not watch.is_dead():
        return owner
    if owner.token:
        _logger.warning("%s was left by %s, which is dead; it is taken over", path, owner.text)
    content = describe_self() + f"{_identity(os.getpid())}\n".encode()
    path.write_bytes(_signed(content))
    time.sleep(SETTLE_S)
    now = _owner(_read(path))
    return RemoteLock(path, content) if now.token == _owner(content).token else now


def _read(path: RemotePath) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _signed(content: bytes) -> bytes:
    """The object's content with the time of this renewal."""
    return content + f"{time.time():.3f}\n".encode()


def _owner(content: bytes) -> Owner:
    text, token, identity, renewed = _lines(content)
    is_alive_here = identity != "" and identity == _identity(_number(identity))
    time_of = float(renewed) if renewed.replace(".", "").isdecimal() else 0.0
    return Owner(text, token, time_of, is_alive_here or None)  # the kernel vouches for it, as by flock


def _is_dead_here(content: bytes) -> bool:
    """Whether the owner is a process of this machine that has ended."""
    identity = _lines(content)[2]
    now = _identity(_number(identity))
    return identity != now and identity.split()[:2] == now.split()[:2]


def _lines(content: bytes) -> tuple[str, str, str, str]:
    """The owner's description, token and identity, and the time of its last renewal."""
    text, token, identity, renewed, *_ = [*content.decode(errors="replace").splitlines(), "", "", "", ""]
    return text, token, identity, renewed


def _number(identity: str) -> int:
    number = [*identity.split(), "", "", ""][2]
    return int(number) if number.isdecimal() else 0


def _identity(process: int) -> str:
    """A process of this machine: start of the machine, container, its number, its start; 0 if it is gone."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    space = os.readlink("/proc/self/ns/pid")
    try:
        state, *values = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        state, values = "X", []
    begun = values[18] if state not in "ZX" else "0"
    return f"{boot} {space} {process} {begun}"
