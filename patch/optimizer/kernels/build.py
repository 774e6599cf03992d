"""Builds adam.cpp into a shared library, once for each text and machine, with whatever C++ compiler is there.

    python patch/optimizer/kernels/build.py      ahead of the first run; `make` does it

Only the standard library is used, so that building loads no torch. The library lies in `build/` beside this
file, or in the user's cache folder where the package cannot be written. Several ranks may ask at once:
one builds, the others wait. A file that another user could have written is never loaded.
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
    """No library: no compiler, a compiler that fails, or no folder to write in."""


def find_or_build() -> Path:
    """The library of this source, flags and machine; built if there is none yet.

    Raises:
        BuildError: with every attempt's reason.
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
        if not _is_ours(library):  # nobody built it while we waited
            _build(library)
    if not _is_ours(library):
        raise PermissionError(f"{library.parent} can be written by other users")
    return library


def _is_ours(library: Path) -> bool:
    """Whether the library is there, and nobody but this user and root can write it or replace it."""
    try:
        found = [library.stat(), library.parent.stat()]
    except FileNotFoundError:
        return False
    trusted = (0, os.getuid())
    return all(s.st_uid in trusted and not s.st_mode & (stat.S_IWGRP | stat.S_IWOTH) for s in found)


@contextmanager
def _lock(file: Path) -> Iterator[None]:
    """Held by one process at a time; where the file system knows no locks, by all: renaming is atomic."""
    with file.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            pass
        yield


def _build(library: Path) -> None:
    os.chmod(library.parent, 0o755)  # whatever the umask
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        _compile(made)
        os.chmod(made, 0o755)
        os.replace(made, library)


def _compile(library: Path) -> None:
    found = [
        name for name in (os.environ.get("CXX"), *_COMPILERS) if name and shutil.which(shlex.split(name)[0])
    ]
    if not found:
        raise BuildError(f"no C++ compiler: none of $CXX, {', '.join(_COMPILERS)}")
    reasons = []
    for name in found:
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
