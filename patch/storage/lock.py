"""Locks a folder for one writer at a time. A second writer is refused, with a message that names the owner.

On disk the lock is a file with flock. The kernel releases it when the process ends, also after `kill -9`. In
a store the lock is an exclusively created object. If a file system has no flock, or a driver no exclusive
creation, two hosts may start at the same moment: then the later writer has the lock.

The lock of a dead process of this host is replaced. So a restart (--max-restarts) keeps the lock, because its
rank 0 stays on its host. A requeued SLURM job keeps it too. A lock of another host stays until a user removes
it: this host cannot tell whether its owner is dead, and some file systems (Lustre with localflock, BeeGFS)
show flock on one host only. If a lock was removed and taken by another process, its former owner notices at
`check_held`, before it publishes anything.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shlex
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from patch.errors import CheckpointError, ConfigError, ConversionError, DataError, PatchError
from patch.logger import get_logger
from patch.storage.places import AnyPath, is_in
from patch.storage.remote import RemotePath
from patch.storage.text_files import read_small

_logger = get_logger(__name__)

_RUN_LOCK = ".lock"
_WAIT_S = 3.0
_WAIT_FOR_DYING_S = 60.0
"""Longer wait for a killed process: it keeps its lock until the kernel has freed its memory."""
_POLL_S = 0.05
_TELL_EVERY_S = 60.0
"""Interval at which the log names the owner to a process that waits without limit."""


class _Request(NamedTuple):
    """A lock to take, and the errors if another process holds it or takes it later."""

    path: AnyPath
    folder: AnyPath
    error: type[PatchError]
    cure: str
    field: str | None
    waits: bool = False
    """Whether to wait for the owner without limit, because two owners would only do the same work twice."""
    lost: type[PatchError] = ConversionError
    """The error if another process took the lock over."""


def hold_run(root: AnyPath) -> AbstractContextManager[None]:
    """Lock a run's folder, or its folder of checkpoints in a store, against other runs.

    A missing folder is created.

    Raises:
        ConfigError: another run has the lock, or it cannot be written. The message names the owner's process,
            host and start, and the command that removes the lock.
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
        ConversionError: another conversion has the lock; see `hold_run`.
    """
    cure = "wait for that conversion, or give another folder (--save)"
    path = target.with_name(f".{target.name}.lock")
    return _hold(_Request(path, target, ConversionError, cure, None))


def wait_for_cache(entry: Path) -> AbstractContextManager[None]:
    """Lock an entry of a cache, and wait while another process makes it; the lock file is beside the entry.

    Raises:
        DataError: the lock file cannot be written.
    """
    cure = "this process waits for its entry of the cache"
    path = entry.with_name(f".{entry.name}.lock")
    return _hold(_Request(path, entry, DataError, cure, "cache_dir", waits=True, lost=DataError))


def check_held(path: AnyPath) -> None:
    """Check that this process still holds the lock of `path`; call it before publishing a file or folder.

    Does nothing if this process has no lock for `path`, or if a user removed the lock and no process took it.

    Args:
        path: a folder that this process has locked, or a path in it.
    Raises:
        CheckpointError, ConversionError, DataError: another process has the lock now; write nothing.
        OSError: the file system or the store does not answer.
    """
    for request, ours in _held:
        if is_in(path, request.folder) and (owner := _at(request.path)) not in (ours, _Owner()):
            raise request.lost(
                f"{path} was not written: {request.folder} now belongs to {owner.text}, because the lock of "
                "this process was removed",
                field=request.field,
            )


_held: list[tuple[_Request, _Owner]] = []
"""The locks of this process, for `check_held`."""


@contextmanager
def _hold(request: _Request) -> Iterator[None]:
    owner = _this_process()
    try:
        descriptor = _wait_for(request, "\n".join(owner).encode())
    except OSError as error:
        cure = "expected a folder that can be written: make room there, or give another one"
        message = f"{request.path} cannot be written: {error.strerror}; {cure}"
        raise request.error(message, field=request.field) from error
    _held.append(held := (request, owner))
    try:
        yield
    finally:
        _held.remove(held)
        with suppress(OSError):  # if the store does not answer, the lock stays
            if _at(request.path) == owner:
                request.path.unlink(missing_ok=True)  # before flock is released: other processes look
        if descriptor is not None:
            os.close(descriptor)


def _wait_for(request: _Request, content: bytes) -> int | None:
    """Wait for the lock and take it. Return the file descriptor with flock, or None in a store."""
    path, begin = request.path, time.monotonic()
    told = begin + _WAIT_S - _TELL_EVERY_S
    if isinstance(path, Path):
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        if isinstance(path, Path):
            owner, descriptor = _take_file(path, content, any_host=request.waits)
        else:
            owner, descriptor = _take_object(path, content)
        if owner is None:
            return descriptor
        what = f"{request.folder} is being written by {owner.text or 'another process'}: {request.cure}"
        message = f"{what}; if that process is gone, remove its lock: {_removal_of(path)}"
        now = time.monotonic()
        if not request.waits and now - begin > (_WAIT_FOR_DYING_S if owner.is_gone else _WAIT_S):
            raise request.error(message, field=request.field)
        if request.waits and now - told > _TELL_EVERY_S:
            told = now
            _logger.info("%s", message)
        time.sleep(_POLL_S)


def _removal_of(path: AnyPath) -> str:
    if isinstance(path, Path):
        return f"rm {shlex.quote(str(path.absolute()))}"
    program = f"import fsspec; lock = fsspec.open({str(path)!r}); lock.fs.rm_file(lock.path)"
    return f"python -c {shlex.quote(program)}"


class _Owner(NamedTuple):
    """The owner of a lock, as its file or object describes it."""

    text: str = ""
    """Process, host and start, for messages; empty if nothing is written yet."""
    token: str = ""
    """Unique for each taking of the lock."""
    identity: str = ""
    """See `_identity`."""
    job: str = ""
    """Number and attempt of the SLURM job."""

    @property
    def is_gone(self) -> bool:
        """Whether it is an ended process of this host, or of this SLURM job before a requeue."""
        job = self.job.partition(".")[0]
        if job and job == os.environ.get("SLURM_JOB_ID") and self.job != _this_job():
            return True
        number = [*self.identity.split(), *"0000"][3]
        now = _identity(int(number) if number.isdecimal() else 0)
        return self.identity.split()[:3] == now.split()[:3] and self.identity != now

    @property
    def is_on_this_machine(self) -> bool:
        """Whether it has this host's name or kernel. Containers of one machine share the kernel."""
        return any(map(str.__eq__, self.identity.split()[:2], _identity(0).split()))


def _identity(process: int) -> str:
    """Return host, boot, container, number and start of a process; the start is 0 if it is gone or dying."""
    boot, space, begun = "-", "-", "0"
    with suppress(OSError):  # the process is gone, or a sandbox hides them
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.readlink("/proc/self/ns/pid")
        if not Path(f"/proc/{process}/statm").read_text().startswith("0 "):
            begun = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{socket.gethostname()} {boot} {space} {process} {begun}"


def _this_process() -> _Owner:
    since = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
    text = f"process {os.getpid()} on {socket.gethostname()} since {since}"
    return _Owner(text, secrets.token_hex(8), _identity(os.getpid()), _this_job())


def _this_job() -> str:
    return f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_RESTART_COUNT', 0)}"


def _read(content: bytes) -> _Owner:
    return _Owner(*content.decode(errors="replace").splitlines()[:4])


def _at(path: AnyPath) -> _Owner:
    try:
        return _read(path.read_bytes() if isinstance(path, RemotePath) else read_small(path))
    except FileNotFoundError:
        return _Owner()


def _take_object(path: RemotePath, content: bytes) -> tuple[_Owner | None, None]:
    """Take a lock in a store, or return its owner if that is another living process."""
    with _alone_on_this_host():
        try:
            path.create_bytes(content)
        except FileExistsError:
            owner = _at(path)
            if not owner.is_gone:  # our own if the driver repeated the request
                return (None if owner == _read(content) else owner), None
            path.write_bytes(content)
    return None, None


def _take_file(path: Path, content: bytes, *, any_host: bool) -> tuple[_Owner | None, int | None]:
    """Take a lock on disk: return None and the file descriptor with flock, or the living owner and None.
    If `any_host`, flock is enough even if the file names an owner on another machine.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        with _alone_on_this_host():
            is_locked = _flock(descriptor)
            owner = _read(os.pread(descriptor, 1000, 0))
            is_free = not owner.text or owner.is_gone
            is_free |= bool(is_locked) and (any_host or owner.is_on_this_machine)
            if is_locked is not False and is_free and _is_at_path(descriptor, path):
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, content, 0)
                return None, descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return owner, None


def _flock(descriptor: int) -> bool | None:
    """Try flock. Return whether it was free, or None if the file system has no flock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at_path(descriptor: int, path: Path) -> bool:
    """Return whether the open file is still at `path`; its last owner may have removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


@contextmanager
def _alone_on_this_host() -> Iterator[None]:
    """Let one process of this host at a time take locks, also if there is no flock on the file system."""
    descriptor = os.open(tempfile.gettempdir(), os.O_RDONLY)
    try:
        deadline = time.monotonic() + _WAIT_S  # a process stuck on a dead file system must not block others
        while _flock(descriptor) is False and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)
