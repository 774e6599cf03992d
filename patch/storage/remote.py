"""Paths on the file systems of fsspec (s3://bucket/run), with the methods of pathlib that checkpoints need.

Every error of a driver becomes an OSError with a text and the URL, and nothing is answered from a driver's
cache. PyPI's universal-pathlib does neither. A request that fails is tried again by the driver alone.
"""

from __future__ import annotations

import errno
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, NamedTuple

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_KNOWN = {
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    FileExistsError: errno.EEXIST,
    IsADirectoryError: errno.EISDIR,
    NotADirectoryError: errno.ENOTDIR,
}
_ABOUT_RIGHTS = re.compile(r"Credentials|Authentication|ProfileNotFound")
"""Classes of errors that drivers do not derive from PermissionError."""
_NOT_EXCLUSIVE = (errno.EINVAL, errno.EPERM, errno.ENOSYS)
"""Answers of an S3 that does not know If-None-Match."""


class Stat(NamedTuple):
    """A store's facts of a file."""

    st_size: int
    st_mtime: float
    """Seconds since 1970; 0 where the driver does not tell."""


def is_url(text: str | None) -> bool:
    """Whether a text is written as a URL, and not as a path."""
    return text is not None and _URL.fullmatch(text) is not None


class RemotePath:
    """A file or folder of a store. Every method that asks the store raises OSError when it fails.

    Args:
        url: such as s3://bucket/run.

    Raises:
        OSError: the URL is malformed, or there is no driver for it.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._system, self._path = _open_system(self._url)

    def __str__(self) -> str:
        return self._url

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that holds it; the path itself if it has no more parts."""
        head, _, _ = self._url.rpartition("/")
        return self if head.endswith("/") else RemotePath(head)

    def is_relative_to(self, other: RemotePath) -> bool:
        """Whether this is `other` or something in it."""
        return f"{self._url}/".startswith(f"{other._url}/")

    @property
    def has_folders(self) -> bool:
        """Whether the store has folders of its own (sftp, hdfs). Others: paths begin with a bucket."""
        return self._path.startswith("/")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn errors of a driver into an OSError with a text and this path's URL."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - drivers raise errors of many classes
            text = (str(getattr(error, "strerror", None) or error).strip().splitlines() or [""])[0]
            kind = next((kind for kind in _KNOWN if isinstance(error, kind)), None)
            if kind is None:
                kind = PermissionError if _ABOUT_RIGHTS.search(type(error).__name__) else OSError
                text = text if type(error) is OSError and text else f"{type(error).__name__}: {text}"
            code = _KNOWN.get(kind) or getattr(error, "errno", None) or errno.EIO
            raise kind(code, text or kind.__name__, self._url) from error

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        with self._errors():
            self._system.invalidate_cache()
            return getattr(self._system, method)(self._path, *args, **options)

    def _kind(self) -> str | None:
        """The kind in fsspec's words: file, directory; None if there is nothing."""
        try:
            return self._ask("info")["type"]
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """Whether there is a file or a folder."""
        return self._kind() is not None

    def is_file(self) -> bool:
        """Whether there is a file."""
        return self._kind() == "file"

    def is_dir(self) -> bool:
        """Whether there is a folder, which in an object store means that there is something in it."""
        return self._kind() == "directory"

    def stat(self) -> Stat:
        """Size and time of a file."""
        return _stat(self._ask("info"))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """The entries of the folder that match."""
        found: list[str] = []
        with suppress(FileNotFoundError):
            found = sorted((self / pattern)._ask("glob"))
        return (self / self._relative(path) for path in found)

    def folders(self) -> list[str]:
        """Names of the folders in this one; none if it does not exist."""
        entries: list[dict[str, Any]] = []
        with suppress(FileNotFoundError):
            entries = self._ask("ls", detail=True)
        return [PurePosixPath(entry["name"]).name for entry in entries if entry["type"] == "directory"]

    def files(self) -> dict[str, Stat]:
        """All files in this folder and those below, by their path in it; none if it does not exist."""
        found: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            found = self._ask("find", detail=True)
        return {self._relative(path): _stat(info) for path, info in found.items()}

    def _relative(self, path: str) -> str:
        return str(self._system._strip_protocol(path)).removeprefix(self._path).lstrip("/")

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """The content, or a range of it."""
        return self._ask("cat_file", start=start, end=end)

    def write_bytes(self, content: bytes) -> int:
        """Create or replace a file; in an object store a reader sees the old or the new content."""
        self.parent.mkdir()
        self._ask("pipe_file", content)
        return len(content)

    def create_bytes(self, content: bytes) -> None:
        """Create a small file that is not there yet.

        Where driver or store cannot do that in one request, it is looked for first.

        Raises:
            FileExistsError: it is there.
        """
        self.parent.mkdir()
        driver = type(self._system)
        if "mode" in inspect.signature(getattr(driver, "_pipe_file", driver.pipe_file)).parameters:
            try:
                self._ask("pipe_file", content, mode="create")
                return
            except OSError as error:
                if error.errno not in _NOT_EXCLUSIVE:
                    raise
        if self.exists():
            raise FileExistsError(errno.EEXIST, "it is there", self._url)
        self._ask("pipe_file", content)

    def mkdir(self) -> None:
        """Create the folder and those above it, where the store has folders."""
        if self.has_folders:
            self._ask("makedirs", exist_ok=True)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file."""
        with suppress(*[FileNotFoundError] if missing_ok else []):
            self._ask("rm_file")

    def remove_tree(self) -> None:
        """Remove a folder with all that is in it; does nothing if there is none."""
        with suppress(FileNotFoundError):
            self._ask("rm", recursive=True)


class RemoteFile:
    """A file that is being uploaded. It appears by `commit`, or not at all where the store has no folders.

    The driver keeps a part of it in memory (s3fs: 50 MiB).

    Raises:
        OSError: as all methods but `discard`: the file cannot be written.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        path.parent.mkdir()
        with path._errors():
            self._stream = path._system.open(path._path, "wb")

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        with self._path._errors():
            self._stream.write(data)

    def commit(self) -> None:
        """Upload what is left and give the file its name."""
        with self._path._errors():
            self._stream.close()

    def discard(self) -> None:
        """Give the file up, if it has no name yet."""
        if not self._stream.closed:
            with suppress(Exception):  # it is given up because of another error
                self._stream.closed = True  # otherwise the garbage collector would upload the rest of it
                self._stream.discard()


def _open_system(url: str) -> tuple[Any, str]:
    """The file system of fsspec that a URL means, and the path in it."""
    match = _URL.fullmatch(url)
    if re.search(r"://.*:.*@|[?]", url):  # a secret key may have slashes
        raise OSError(
            errno.EINVAL,
            "expected a URL without a password or a query, which would be seen in logs: give the driver its "
            "secrets by its variables or files (s3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)",
        )
    if match is None or not match[2].strip("/"):
        raise OSError(errno.EINVAL, "expected a URL with a folder, such as s3://bucket/run", url)
    if match[1] == "hf":
        raise OSError(errno.EINVAL, "expected a name of the hub without hf://, as org/name", url)
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(url)
    except Exception as error:  # noqa: BLE001 - such as an unknown protocol, or a driver without a setting
        lacks = f"{match[1]}:// needs a driver that is not installed: " * isinstance(error, ImportError)
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise OSError(errno.EINVAL, f"{lacks}{reason}", url) from error
    return system, str(path)


def _stat(info: dict[str, Any]) -> Stat:
    times = ("LastModified", "mtime", "last_modified", "updated", "created")
    time_of = next((info[key] for key in times if info.get(key) is not None), 0.0)
    if isinstance(time_of, str):  # as gcsfs has it
        time_of = datetime.fromisoformat(time_of)
    seconds = time_of.timestamp() if isinstance(time_of, datetime) else time_of
    return Stat(int(info.get("size") or 0), float(seconds))
