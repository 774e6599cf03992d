"""Builds adam.cpp into a shared library, once for each source text and machine, with $CXX or c++.

    python patch/optimizer/kernels/build.py      before the first run; `make` does it

It imports only the standard library, not torch. The library is written to `build/` beside this file, or to
the user's cache folder if the package is not writable. If several ranks call it at the same time, one rank
builds; the others wait and share its result or error. A file that another user can write is never loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

SOURCE = Path(__file__).with_name("adam.cpp")
FLAGS = "-std=c++17 -O3 -fPIC -shared -pthread -ffp-contract=off -fno-math-errno".split()
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 120
_MOST_SHARERS = 10


class BuildError(Exception):
    """The library was not built: no compiler, a compiler error, or no writable folder."""


def find_or_build() -> Path:
    """Return the library for this source, these flags and this machine; build it if it does not exist.

    Raises:
        BuildError: the build failed; the message has the reason.
    """
    key = hashlib.sha256(SOURCE.read_bytes())
    key.update(" ".join([*FLAGS, platform.machine(), *platform.libc_ver()]).encode())
    name = f"adam-{key.hexdigest()[:16]}.so"
    reasons = []
    for folder in _folders():
        try:
            return _find_or_build(folder / name)
        except OSError as reason:
            reasons.append(str(reason))
    raise BuildError("; ".join(reasons))


def _folders() -> Iterator[Path]:
    yield SOURCE.parent / "build"
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:  # a user without a home
        return
    yield Path(cache) / "llama-megatron-patch"


def _find_or_build(library: Path) -> Path:
    if _is_ours(library):
        return library
    library.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with library.with_suffix(".lock").open("a+") as lock:
        has_waited = _lock(lock)
        lock.seek(0)
        if not _is_ours(library):  # no other process built it while this one waited
            if has_waited and (reason := lock.read()):
                raise BuildError(reason)  # of the process that held the lock
            lock.truncate(0)
            try:
                _build(library)
            except BuildError as error:
                lock.write(str(error))
                raise
    if not _is_ours(library):
        raise PermissionError(f"{library.parent} can be written by other users")
    return library


def _is_ours(library: Path) -> bool:
    """Return whether the library exists, and only this user and root can write or replace it."""
    try:
        stats = [library.stat(), library.parent.stat()]
    except FileNotFoundError:
        return False
    trusted = (0, os.getuid())
    return all(s.st_uid in trusted and not s.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for s in stats)


def _lock(file: IO[str]) -> bool:
    """Lock a file until it is closed, if locks work; return whether another process held the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(file, fcntl.LOCK_EX)
        return True
    except OSError:
        pass
    return False


def _build(library: Path) -> None:
    os.chmod(library.parent, 0o755)  # the umask may have removed or added rights
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        new_library = Path(folder) / library.name
        _compile(new_library)
        os.chmod(new_library, 0o755)
        os.replace(new_library, library)


def _compile(library: Path) -> None:
    names = (os.environ.get("CXX"), *_COMPILERS)
    name = next((each for each in names if each and shutil.which(shlex.split(each)[0])), None)
    if name is None:
        raise BuildError(f"no C++ compiler: none of $CXX, {', '.join(_COMPILERS)}")
    command = [*shlex.split(name), *FLAGS, str(SOURCE), "-o", str(library)]
    # With more runnable processes than cores, the compiler takes proportionally longer.
    limit_s = _TIMEOUT_S * min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), _MOST_SHARERS)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as compiler:
        try:
            _, errors = compiler.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(compiler.pid, signal.SIGKILL)  # g++ is a driver: cc1plus does the work
            if isinstance(error, subprocess.TimeoutExpired):
                what = f"compiling took longer than {limit_s:.3g} s; set CXX to another compiler"
                raise BuildError(f"{name}: {what}") from error
            raise
    if compiler.returncode:
        reason = errors.strip() or f"exit code {compiler.returncode}"
        raise BuildError(f"{name}: {reason}".split("\n")[0])


if __name__ == "__main__":
    try:
        find_or_build()
    except BuildError as reason:
        sys.stderr.write(f"the C++ Adam kernel was not built; NumPy will be used: {reason}\n")
