"""Paths on the file systems of fsspec (s3://bucket/run), with the methods of pathlib that checkpoints need.

PyPI's universal-pathlib has such paths too. Here each request is also tried again when the store fails for a
while, every error of a driver becomes an OSError with a text, and nothing is answered from a driver's cache.
"""

from __future__ import annotations

import errno
import inspect
import io
import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import partial
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeVar

from patch.device import start_thread
from patch.logger import get_logger

_logger = get_logger(__name__)
_Value = TypeVar("_Value")

PATIENCE_S = 30.0
"""How long after its first failure a request is still tried again."""
_FIRST_WAIT = 1 / 30
"""Share of that time; each wait is twice as long as the one before, so there are five or six attempts."""
_READ_AHEAD_BYTES = 16 * 2**20
"""Most bytes of one request, where a file is read in its order."""
_FIRST_READ_BYTES = 2**18
"""Bytes of a request for another place; each one that goes on from there is twice as long."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_HADOOP = ": install Java and Hadoop; set JAVA_HOME, HADOOP_HOME, CLASSPATH (`hadoop classpath --glob`)"
_NEEDS_JAVA = {"hdfs": _HADOOP, "viewfs": _HADOOP}
"""Schemes whose driver loads Java's library: which it did not find it tells in some ninety lines."""
_FINAL = (
    FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError,
    NotImplementedError, ImportError,
)  # fmt: skip
_FINAL_CODES = (errno.EINVAL, errno.EPERM, errno.ENOSYS)
_FINAL_NAMES = re.compile(
    r"NoCredentials|PartialCredentials|DefaultCredentials|Authentication|ProfileNotFound"
)
"""Classes of errors about credentials that drivers do not derive from PermissionError."""


class Stat(NamedTuple):
    """What a store knows of a file."""

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
        patience_s: how long after its first failure a request is still tried again, but once at least;
            0: not at all. The driver has tried it several times by itself then.

    Raises:
        OSError: the URL is malformed, or there is no driver for it.
    """

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        self._url, self.patience_s = url.rstrip("/"), patience_s
        self._system, self._path = _open_system(self._url)

    def _at(self, url: str) -> RemotePath:
        path = object.__new__(RemotePath)
        path._url, path.patience_s, path._system = url, self.patience_s, self._system
        path._path = str(self._system._strip_protocol(url))
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RemotePath, self._url, patience_s=self.patience_s), ()

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"RemotePath({self._url!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RemotePath) and self._url == other._url

    def __hash__(self) -> int:
        return hash(self._url)

    def __truediv__(self, name: str) -> RemotePath:
        return self._at(f"{self._url}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return self._url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """The folder that holds it; the path itself if it has no more parts."""
        head, _, _ = self._url.rpartition("/")
        return self if head.endswith("/") else self._at(head)

    def is_relative_to(self, other: RemotePath) -> bool:
        """Whether this is `other` or something in it."""
        return self._url == other._url or self._url.startswith(f"{other._url}/")

    @property
    def has_folders(self) -> bool:
        """Whether the store has folders of its own (sftp, hdfs). Others: paths begin with a bucket."""
        return self._path.startswith("/")

    def with_patience(self, seconds: float) -> RemotePath:
        """The same path, whose failing requests are tried again for so long."""
        path = self._at(self._url)
        path.patience_s = seconds
        return path

    def retried(self, request: Callable[[], _Value], given_up: threading.Event | None = None) -> _Value:
        """Call `request` until it succeeds; each failure is logged.

        Args:
            request: may be called several times.
            given_up: once it is set, no further attempt is made.

        Raises:
            OSError: it failed for good, or for longer than `patience_s`.
        """
        since, wait = None, _FIRST_WAIT * self.patience_s
        while True:
            try:
                return request()
            except Exception as error:  # noqa: BLE001 - drivers raise errors of many classes
                failure = self._translated(error)
                pause = wait * random.uniform(0.7, 1.3)
                is_late = since is not None and time.monotonic() + pause > since + self.patience_s
                if _is_final(error) or is_late or not pause or (given_up and given_up.is_set()):
                    raise failure from error
            _logger.warning("%s failed (%s), again in %.1f s", self, failure.strerror, pause)
            if given_up is not None:
                given_up.wait(pause)
            else:
                time.sleep(pause)
            since, wait = since or time.monotonic() - pause, 2 * wait

    def _translated(self, error: Exception) -> OSError:
        """The error as an OSError with a text and this path's URL."""
        text = (str(getattr(error, "strerror", None) or error).strip().splitlines() or [""])[0]
        known = next((kind for kind in _FINAL[:5] if isinstance(error, kind)), None)
        if _FINAL_NAMES.search(type(error).__name__):
            known, text = PermissionError, f"{type(error).__name__}: {text}"
        if known is not None:
            codes = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}
            return known(codes.get(known, errno.EIO), text or known.__name__, self._url)
        name = type(error).__name__
        code = getattr(error, "errno", None) or errno.EIO
        return OSError(code, text if type(error) is OSError and text else f"{name}: {text}", self._url)

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        def request() -> Any:
            self._system.invalidate_cache()
            return getattr(self._system, method)(self._path, *args, **options)

        return self.retried(request)

    def _kind(self) -> str | None:
        """What fsspec calls it: file, directory; None if there is nothing."""
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
        """What is in the folder and matches."""
        found: list[str] = []
        with suppress(FileNotFoundError):
            found = sorted((self / pattern)._ask("glob"))
        for path in found:
            yield self / self._relative(path)

    def folders(self) -> list[str]:
        """Names of the folders in this one; none if it does not exist."""
        try:
            entries = self._ask("ls", detail=True)
        except FileNotFoundError:
            return []
        return [PurePosixPath(entry["name"]).name for entry in entries if entry["type"] == "directory"]

    def files(self) -> dict[str, Stat]:
        """All files in this folder and those below, by their path in it; none if it does not exist."""
        try:
            found = self._ask("find", detail=True)
        except FileNotFoundError:
            return {}
        return {self._relative(path): _stat(info) for path, info in found.items()}

    def _relative(self, path: str) -> str:
        return str(self._system._strip_protocol(path)).removeprefix(self._path).lstrip("/")

    def read_bytes(self) -> bytes:
        """The whole content."""
        return self._ask("cat_file")

    def write_bytes(self, content: bytes) -> int:
        """Create or replace a file; in an object store a reader sees the old or the new content."""
        self.parent.mkdir()
        self._ask("pipe_file", content)
        return len(content)

    def create_bytes(self, content: bytes) -> None:
        """Create a small file that is not there yet; a driver or store that cannot tell replaces one.

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
                if error.errno not in _FINAL_CODES:  # those of an S3 that does not know If-None-Match
                    raise
        self._ask("pipe_file", content)

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file for reading, in large requests."""
        assert mode == "rb", "files are written by `RemoteFile` or `write_bytes`"
        return io.BufferedReader(_Ranges(self), _READ_AHEAD_BYTES)

    def mkdir(self) -> None:
        """Create the folder and those above it, where the store has folders."""
        if self.has_folders:
            self._ask("makedirs", exist_ok=True)

    def unlink(self, *, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            self._ask("rm_file")
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove_tree(self) -> None:
        """Remove a folder with all that is in it; does nothing if there is none."""
        with suppress(FileNotFoundError):
            self._ask("rm", recursive=True)


class _Ranges(io.RawIOBase):
    """Reads a file by ranges of bytes; each request is tried again when it fails."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._path, self._position, self._size = path, 0, path.stat().st_size
        self._last_end, self._num_bytes = -1, _FIRST_READ_BYTES

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The place of the next byte."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place; as in any file."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the begin of the buffer."""
        begin = self._position
        is_next = begin == self._last_end
        self._num_bytes = min(2 * self._num_bytes, _READ_AHEAD_BYTES) if is_next else _FIRST_READ_BYTES
        end = min(begin + len(buffer), begin + self._num_bytes, self._size)
        if end <= begin:
            return 0
        content = self._path._ask("cat_file", start=begin, end=end)
        if len(content) != end - begin:
            raise OSError(
                errno.EIO, f"{len(content)} bytes came, {end - begin} were asked for", str(self._path)
            )
        buffer[: len(content)] = content
        self._position = self._last_end = end
        return len(content)


class RemoteFile:
    """A file that is being uploaded. It appears by `commit`, or not at all where the store has no folders.

    The driver keeps a part of it in memory (s3fs: 50 MiB); a part that fails is the driver's to try again.

    Raises:
        OSError: as all methods but `discard`: the file cannot be written.
    """

    def __init__(self, path: RemotePath) -> None:
        self._path = path
        path.parent.mkdir()
        with self._errors():
            self._stream = path._system.open(path._path, "wb")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - drivers raise errors of many classes
            raise self._path._translated(error) from error

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        with self._errors():
            self._stream.write(data)

    def commit(self) -> None:
        """Upload what is left and give the file its name."""
        with self._errors():
            self._stream.close()

    def discard(self) -> None:
        """Give the file up, if it has no name yet; its parts are removed in the background."""
        stream = self._stream
        if stream.closed:
            return
        if hasattr(stream, "buffer"):
            stream.closed = True  # otherwise the garbage collector would upload the rest of it
        if hasattr(stream, "discard"):
            start_thread("remove parts", self._remove_parts)

    def _remove_parts(self) -> None:
        try:
            self._stream.discard()
        except Exception as error:  # noqa: BLE001 - it is given up because of another error
            _logger.info("%s: its parts were not removed: %s", self._path, error)


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
    except ImportError as error:
        raise OSError(
            errno.ENOSYS, f"{match[1]}:// needs a driver that is not installed: {error}", url
        ) from error
    except Exception as error:  # noqa: BLE001 - such as an unknown protocol, or a driver without a setting
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if match[1] in _NEEDS_JAVA:
            reason += _NEEDS_JAVA[match[1]]
        raise OSError(errno.EINVAL, reason, url) from error
    return system, str(path)


def _stat(info: dict[str, Any]) -> Stat:
    time_of = next((info[key] for key in ("LastModified", "mtime", "last_modified", "updated", "created")
                    if info.get(key) is not None), 0.0)  # fmt: skip
    if isinstance(time_of, str):  # as gcsfs has it
        with suppress(ValueError):
            time_of = datetime.fromisoformat(time_of)
    seconds = time_of.timestamp() if isinstance(time_of, datetime) else time_of
    return Stat(int(info.get("size") or 0), float(seconds) if isinstance(seconds, int | float) else 0.0)


def _is_final(error: Exception) -> bool:
    """Whether trying again cannot help."""
    is_about_rights = _FINAL_NAMES.search(type(error).__name__) is not None
    return isinstance(error, _FINAL) or getattr(error, "errno", None) in _FINAL_CODES or is_about_rights
