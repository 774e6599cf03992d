"""A folder of checkpoints on a disk or in a store: the one place that knows how the two differ.

Code that reads and writes checkpoints has an `AnyPath` and calls what pathlib and `RemotePath` both have, or
else a function of this module. On a disk these do what they always did: files are flushed (fsync), and a
folder gets its name by renaming. A store has no renaming: a folder counts once its marker, written last, is
there, and is removed marker first.
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
from patch.storage.remote import RemoteFile, RemotePath, Stat, is_url

AnyPath = Path | RemotePath
StrPath = str | os.PathLike[str]
"""The types of a path on the disk that other programs may pass."""

_FLUSHED_BYTES = 16 * 2**20
_WINDOW_BYTES = 2**20
"""Bytes read at once from a disk: they are still in the processor's cache when they are used."""
_REMOTE_WINDOW_BYTES = 16 * 2**20
_SYNC_FILE_RANGE_WRITE = 2
"""Start to write dirty pages, and wait for none."""
_sync_file_range = ctypes.CDLL(None).sync_file_range
_sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def any_path(text: str) -> AnyPath:
    """The path that a text means: a URL, or a path on the disk.

    Raises:
        OSError: the URL is malformed, or there is no driver for it.
    """
    return RemotePath(text) if is_url(text) else Path(text)


def local_path(path: StrPath) -> Path:
    """The path on the disk that another program or a user gives.

    Raises:
        ConfigError: it is a URL.
    """
    if is_url(text := os.fspath(path)):
        raise ConfigError(f"got a URL ({text.partition('://')[0]}://...), expected a path on this machine")
    return Path(path)


def copy_of(folder: Path, name: str, target: Path) -> None:
    """Copy a file of a model's folder, but not what a link there points at elsewhere.

    In the hub's cache all files of a snapshot are links into the blobs beside it, which are the model's too.

    Args:
        folder: the model's folder.
        name: of the file, with the folders between.
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
    """Whether `path` is `folder` or something in it."""
    if isinstance(path, RemotePath) or isinstance(folder, RemotePath):
        return f"{path}/".startswith(f"{folder}/")
    return path.absolute().is_relative_to(folder.absolute())


def nearest_folder(path: Path) -> Path:
    """The path itself if it exists, or the nearest of the folders above it."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.exists())


IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files are host memory."""


def file_system_of(folder: Path) -> str:
    """The kind of file system that a folder, an absolute path, is on."""
    import psutil

    around = [part for part in psutil.disk_partitions(all=True) if folder.is_relative_to(part.mountpoint)]
    # Of several at one place the last was mounted over the others.
    return max(reversed(around), key=lambda part: len(part.mountpoint)).fstype if around else "unknown"


def subfolders(folder: AnyPath) -> list[str]:
    """Names of the folders in this one, in no particular order; none if it does not exist."""
    if isinstance(folder, RemotePath):
        return folder.folders()
    return [path.name for path in folder.glob("*") if path.is_dir()]


def file_stats(folder: AnyPath) -> dict[str, Stat]:
    """Size and time of each file in this folder and those below, by its path in it.

    Raises:
        OSError: a file cannot be looked at, or a store cannot be asked.
    """
    if isinstance(folder, RemotePath):
        return folder.files()
    files = {str(path.relative_to(folder)): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {name: Stat(stat.st_size, stat.st_mtime) for name, stat in files.items()}


def file_sizes(folder: AnyPath) -> dict[str, int]:
    """Bytes of each file; see `file_stats`."""
    return {name: stat.st_size for name, stat in file_stats(folder).items()}


class EarlyFlush:
    """Lets the disk begin with what is written while more is, so that fsync has little left to wait for.

    It promises nothing: only fsync makes bytes durable, and reports what the disk refused.
    """

    def __init__(self) -> None:
        self._num_bytes = 0

    def wrote(self, num_bytes: int, *descriptors: int) -> None:
        """Count bytes that were written to files; every 16 MiB, begin to flush these."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _FLUSHED_BYTES:
            self._num_bytes = 0
            for descriptor in descriptors:
                _sync_file_range(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


class _LocalFile:
    """A new file on a disk."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self._early = EarlyFlush()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        self._stream.write(data)
        self._early.wrote(len(data), self._stream.fileno())

    def commit(self) -> None:
        """Flush the file to the disk and close it."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def discard(self) -> None:
        """Close the file, which stays as it is."""
        self._stream.close()


NewFile = _LocalFile | RemoteFile


def new_file(path: AnyPath) -> NewFile:
    """Create a file that is written piece by piece; `commit` makes it durable.

    Raises:
        OSError: it cannot be created.
    """
    return RemoteFile(path) if isinstance(path, RemotePath) else _LocalFile(path)


def check_kind(path: Path) -> None:
    """Raise OSError for a pipe or a device: to open one may wait for ever, and it has perhaps no end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", str(path))


def open_to_read(path: Path) -> BufferedReader:
    """Open a regular file of a disk.

    Raises:
        OSError: it cannot be opened, or is a pipe or a device.
    """
    check_kind(path)
    return path.open("rb")


def windows_of(path: AnyPath) -> Iterator[memoryview | bytes]:
    """The content of a regular file piece by piece; a piece is valid until the next one is read.

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
