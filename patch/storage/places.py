"""Paths on a disk or in a store. Only this module knows how the two differ.

Code that reads and writes checkpoints has an `AnyPath`. It calls methods that pathlib and `RemotePath` share,
or functions of this module. On disk, files are flushed (fsync) and folders are renamed. A store cannot
rename: a folder counts as complete once its marker, written last, exists. The marker is removed first.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

from patch.errors import ConfigError, ConversionError
from patch.storage.remote import RemotePath, Stat, is_url

AnyPath = Path | RemotePath
StrPath = str | os.PathLike[str]
"""Types of a path on disk that other programs may pass."""

_FLUSHED_BYTES = 16 * 2**20
_WINDOW_BYTES = 2**20
"""Bytes read from a disk at a time; they fit the processor's cache."""
_REMOTE_WINDOW_BYTES = 16 * 2**20
_SYNC_FILE_RANGE_WRITE = 2
"""Start to write dirty pages without waiting."""
_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def any_path(text: str) -> AnyPath:
    """Return the path of a text: a URL or a path on the disk.

    Raises:
        OSError: the URL is malformed, or there is no driver for it.
    """
    return RemotePath(text) if is_url(text) else Path(text)


def local_path(path: StrPath) -> Path:
    """Return the path on disk that another program or a user gives.

    Raises:
        ConfigError: it is a URL.
    """
    if is_url(text := os.fspath(path)):
        raise ConfigError(f"got a URL ({text.partition('://')[0]}://...), expected a path on this machine")
    return Path(path)


def copy_of(folder: Path, name: str, target: Path) -> None:
    """Copy a file of a model's folder, but refuse a link to a file outside of the folder.

    In the hub's cache all files of a snapshot are links into `blobs` beside it, which is allowed too.

    Args:
        name: file name, relative to the folder.
        target: the new file.
    Raises:
        ConversionError: the file is a link out of the folder.
        OSError: it cannot be copied.
    """
    homes = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        homes.append(folder.absolute().parents[1].resolve() / "blobs")
    if not any((folder / name).resolve().is_relative_to(home) for home in homes):
        raise ConversionError(
            f"{folder / name} is a link to a file outside of {folder}, expected a file in it: copy it there "
            "(cp -L)"
        )
    shutil.copyfile(folder / name, target)


def is_in(path: AnyPath, folder: AnyPath) -> bool:
    """Return whether `path` is `folder` or a path in it."""
    if isinstance(path, RemotePath) or isinstance(folder, RemotePath):
        return f"{path}/".startswith(f"{folder}/")
    return path.absolute().is_relative_to(folder.absolute())


def nearest_folder(path: Path) -> Path:
    """Return the path itself if it exists, or the nearest existing folder above it."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are in host memory."""


def file_system_of(folder: Path) -> str:
    """Return the file system type of an absolute path."""
    import psutil

    around = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    # If several are mounted at one place, the last one hides the rest.
    return max(reversed(around), key=lambda part: len(part.mountpoint)).fstype if around else "unknown"


def subfolders(folder: AnyPath) -> list[str]:
    """Return the names of the folders in this folder, in any order; empty if it does not exist."""
    if isinstance(folder, RemotePath):
        return folder.folders()
    return [path.name for path in folder.glob("*") if path.is_dir()]


def file_stats(folder: AnyPath) -> dict[str, Stat]:
    """Return size and time of each file in this folder and its subfolders, by relative path.

    Raises:
        OSError: a file cannot be inspected, or a store does not answer.
    """
    if isinstance(folder, RemotePath):
        return folder.files()
    files = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: Stat(stat.st_size, stat.st_mtime) for name, stat in files.items()}


def file_sizes(folder: AnyPath) -> dict[str, int]:
    """Return the bytes of each file; see `file_stats`."""
    return {name: stat.st_size for name, stat in file_stats(folder).items()}


class EarlyFlush:
    """Starts flushing while more data is written, so that fsync has less to wait for.
    It promises nothing: only fsync makes bytes durable and reports the disk's errors.
    """

    def __init__(self) -> None:
        self._num_bytes = 0

    def wrote(self, num_bytes: int, *descriptors: int) -> None:
        """Count written bytes; every 16 MiB, start to flush these files."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _FLUSHED_BYTES:
            self._num_bytes = 0
            for descriptor in descriptors:
                _sync_file_range(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


def check_kind(path: Path) -> None:
    """Raise OSError for a pipe or a device: opening may block forever, and reading may not end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", str(path))


def open_to_read(path: Path) -> BufferedReader:
    """Open a regular file on disk.

    Raises:
        OSError: it cannot be opened, or is a pipe or a device.
    """
    check_kind(path)
    return path.open("rb")


def windows_of(path: AnyPath) -> Iterator[memoryview | bytes]:
    """Yield the content of a regular file piece by piece; a piece is valid until the next piece is read.

    Raises:
        OSError: it cannot be read.
    """
    if isinstance(path, RemotePath):
        size = path.stat().st_size
        for begin in range(0, size, _REMOTE_WINDOW_BYTES):
            yield path.read_bytes(begin, min(begin + _REMOTE_WINDOW_BYTES, size))
        return
    check_kind(path)
    window = memoryview(bytearray(_WINDOW_BYTES))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(window):
            yield window[:count]
