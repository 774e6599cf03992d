"""Paths on the file systems of fsspec (s3://bucket/run), with the methods of pathlib that checkpoints need.

Every error of a driver becomes an OSError with a text and the URL. No answer comes from a driver's cache.
PyPI's universal-pathlib does neither. Only the driver repeats failed requests.
"""

from __future__ import annotations

import errno
import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import PurePosixPath
from typing import Any, NamedTuple

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_KNOWN = FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError
_ABOUT_RIGHTS = re.compile(r"Credentials|Authentication|ProfileNotFound")
"""Access errors that drivers do not derive from PermissionError."""
_NOT_EXCLUSIVE = (errno.EINVAL, errno.EPERM, errno.ENOSYS)
"""Errors of an S3 service that does not support If-None-Match."""


class Stat(NamedTuple):
    """Size and time of a file in a store."""

    st_size: int
    st_mtime: float
    """Seconds since 1970, or 0 if the driver has no time."""


def is_url(text: str | None) -> bool:
    """Return whether a text is a URL and not a path."""
    return text is not None and _URL.fullmatch(text) is not None


class RemotePath:
    """A file or folder in a store. Every method that calls the store raises OSError if it fails.

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
        """The last part of the path."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The parent folder, or the path itself if it has no more parts."""
        head, _, _ = self._url.rpartition("/")
        return self if head.endswith("/") else RemotePath(head)

    @property
    def has_folders(self) -> bool:
        """Whether the store has real folders (sftp, hdfs). In object stores paths begin with a bucket."""
        return self._path.startswith("/")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of a driver into an OSError with a text and this path's URL."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - drivers raise errors of many classes
            text = (str(getattr(error, "strerror", None) or error).strip().splitlines() or [""])[0]
            kind: type[OSError] | None = next((kind for kind in _KNOWN if isinstance(error, kind)), None)
            if kind is None:
                kind = PermissionError if _ABOUT_RIGHTS.search(type(error).__name__) else OSError
                text = text if type(error) is OSError and text else f"{type(error).__name__}: {text}"
            code = getattr(error, "errno", None) or errno.EIO
            raise kind(code, text or kind.__name__, self._url) from error

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        with self.errors():
            self._system.invalidate_cache()
            return getattr(self._system, method)(self._path, *args, **options)

    def _ask_if_there(self, method: str, **options: Any) -> Any:
        """Ask the store; return {} if nothing is there."""
        try:
            return self._ask(method, **options)
        except FileNotFoundError:
            return {}

    def exists(self) -> bool:
        """Return whether there is a file or a folder."""
        return bool(self._ask_if_there("info"))

    def is_file(self) -> bool:
        """Return whether there is a file."""
        return self._ask_if_there("info").get("type") == "file"

    def is_dir(self) -> bool:
        """Return whether there is a folder; in an object store, whether there are files in it."""
        return self._ask_if_there("info").get("type") == "directory"

    def stat(self) -> Stat:
        """Return size and time of a file."""
        return _stat(self._ask("info"))

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Return the entries of the folder that match."""
        found = sorted((self / pattern)._ask_if_there("glob"))
        return (self / self._relative(path) for path in found)

    def folders(self) -> list[str]:
        """Return the names of the folders in this folder; empty if it does not exist."""
        entries = self._ask_if_there("ls", detail=True)
        return [PurePosixPath(entry["name"]).name for entry in entries if entry["type"] == "directory"]

    def files(self) -> dict[str, Stat]:
        """Return all files in this folder and its subfolders, by relative path; empty if there are none."""
        found = dict(self._ask_if_there("find", detail=True))
        return {self._relative(path): _stat(info) for path, info in found.items()}

    def _relative(self, path: str) -> str:
        return str(self._system._strip_protocol(path)).removeprefix(self._path).lstrip("/")

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """Return the content, or a range of bytes."""
        return self._ask("cat_file", start=start, end=end)

    def write_bytes(self, content: bytes) -> int:
        """Create or replace a file; in an object store a reader sees the old or the new content."""
        self.parent.mkdir()
        self._ask("pipe_file", content)
        return len(content)

    def open_to_upload(self) -> Any:
        """Return a new file; the driver keeps a part of it in memory (s3fs: 50 MiB). Use it in `errors`."""
        self.parent.mkdir()
        return self._ask("open", "wb")

    def create_bytes(self, content: bytes) -> None:
        """Create a small file, which must not exist.

        If the driver or the store cannot do so in one request, a check for the file precedes the write.

        Raises:
            FileExistsError: the file exists.
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
        """Create the folder and its parents, if the store has real folders."""
        if self.has_folders:
            self._ask("makedirs", exist_ok=True)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file."""
        (self._ask_if_there if missing_ok else self._ask)("rm_file")

    def remove_tree(self) -> None:
        """Remove a folder and its contents, if it exists."""
        self._ask_if_there("rm", recursive=True)


def _open_system(url: str) -> tuple[Any, str]:
    match = _URL.fullmatch(url)
    if re.search(r"://.*:.*@|[?]", url):  # a secret key may contain slashes
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
    if isinstance(time_of, str):  # gcsfs
        time_of = datetime.fromisoformat(time_of)
    seconds = time_of.timestamp() if isinstance(time_of, datetime) else time_of
    return Stat(int(info.get("size") or 0), float(seconds))
