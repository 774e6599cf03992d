"""Builds adam.cpp into a shared library with any C++ compiler, once for each source text and machine.

    python patch/optimizer/kernels/build.py      before the first run; `make` does it

It imports only the standard library, not torch. The library is written to `build/` beside this file, or to
the user's cache folder if the package is not writable. If several ranks call it at the same time, one builds
and the others wait. A file that another user could have written is never loaded.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = Path(__file__).with_name("adam.cpp")
FLAGS = "-std=c++17 -O3 -fPIC -shared -pthread -ffp-contract=off -fno-math-errno".split()
_COMPILERS = ("c++", "g++", "clang++")
_TIMEOUT_S = 120


class BuildError(Exception):
    """The library was not built: no compiler, a compiler error, or no writable folder."""


def find_or_build() -> Path:
    """The library for this source, these flags and this machine; built if it does not exist.

    Raises:
        BuildError: no attempt succeeded; the message has the reason of each.
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
    with _lock(library.with_suffix(".lock")):
        if not _is_ours(library):  # no other process built it while this one waited
            _build(library)
    if not _is_ours(library):
        raise PermissionError(f"{library.parent} can be written by other users")
    return library


def _is_ours(library: Path) -> bool:
    """Whether the library exists, and only this user and root can write or replace it."""
    try:
        stats = [library.stat(), library.parent.stat()]
    except FileNotFoundError:
        return False
    trusted = (0, os.getuid())
    return all(s.st_uid in trusted and not s.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for s in stats)


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """A lock between processes. On a file system without locks it does nothing: renaming is atomic anyway."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _build(library: Path) -> None:
    os.chmod(library.parent, 0o755)  # the umask may have removed these rights, or added others
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        new_library = Path(folder) / library.name
        _compile(new_library)
        os.chmod(new_library, 0o755)
        os.replace(new_library, library)


def _compile(library: Path) -> None:
    compilers = [
        name for name in (os.environ.get("CXX"), *_COMPILERS) if name and shutil.which(shlex.split(name)[0])
    ]
    if not compilers:
        raise BuildError(f"no C++ compiler: none of $CXX, {', '.join(_COMPILERS)}")
    reasons = []
    for name in compilers:
        command = [*shlex.split(name), *FLAGS, str(SOURCE), "-o", str(library)]
        try:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
            return
        except subprocess.TimeoutExpired:
            reasons.append(f"{name}: longer than {_TIMEOUT_S} s")
        except subprocess.CalledProcessError as error:
            reasons.append(f"{name}: {error.stderr.strip() or error}".split("\n")[0])
    raise BuildError("; ".join(reasons))


if __name__ == "__main__":
    try:
        find_or_build()
    except BuildError as reason:
        sys.stderr.write(f"the C++ Adam kernel was not built; NumPy will be used: {reason}\n")
