"""Memory on a disk: buffers in an unnamed file, read ahead and written behind by threads.

A buffer is a meta tensor: it has a shape and no values. Views of the meta tensor are parts of the buffer.
`on_host` and `write_values` access any part through the page cache. `start_read` and `start_write` move
whole buffers between the file and aligned memory with O_DIRECT, if the file system supports it.

The kernel frees an unnamed file when its last process ends, even after kill -9. No file is left in the
folder, and no other program can shorten or replace it. Any number of ranks and runs can share a folder.
Disk space is reserved when a buffer is allocated.

Requests of 64 MiB from two threads reach the full disk bandwidth: os.preadv and os.pwritev release the GIL,
and the kernel splits each request over the disk's queue. PyPI's liburing (2026.3) accepts only bytearrays,
and containers forbid io_uring by default. kvikio (26.10) needs cupy and CUDA; without GPUDirect Storage it
uses the same kind of threads.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from threading import Lock
from typing import NamedTuple

import torch

from patch.device import device_setter
from patch.errors import TrainingError
from patch.logger import get_logger
from patch.memory.offload_device import whole_pages
from patch.text import size_text

_logger = get_logger(__name__)

_REQUEST_BYTES = 64 << 20
_NUM_THREADS = 2

Jobs = Sequence[Future[None]]
"""Requests of one transfer, which is complete when all of them are."""


class DiskMemory:
    """Memory in an unnamed file in `folder`, which is created: an Allocator whose buffers are meta tensors.

    Raises:
        TrainingError: the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with self._failing("a file cannot be created"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 - it ends with this object
        self._direct = self._file
        try:
            again = os.open(f"/proc/self/fd/{self._file.fileno()}", os.O_RDWR | os.O_DIRECT)
            self._direct = os.fdopen(again, "r+b", buffering=0)
        except OSError:
            _logger.warning("%s takes no direct I/O: states there pass through the page cache", folder)
        self._readers, self._writers = (
            ThreadPoolExecutor(_NUM_THREADS, f"disk-{what}", initializer=device_setter())
            for what in ("read", "write")
        )
        self._end = 0
        self._unused: dict[int, list[int]] = defaultdict(list)
        """Offsets of unused ranges of the file, by the length of the range."""
        self._writes: dict[int, Jobs] = {}
        self._lock = Lock()
        self.num_bytes_moved = 0
        """Bytes that `start_read` and `start_write` moved so far."""

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Reserve a (numel,) buffer: zeros, or the old contents of a freed buffer.

        Raises:
            TrainingError: the disk or the user's quota is full.
        """
        buffer = torch.empty(numel, dtype=dtype, device="meta")
        size = whole_pages(buffer.nbytes)
        if self._unused[size]:
            begin = self._unused[size].pop()
        else:
            with self._failing(f"{size_text(size)} beside {size_text(self._end)} cannot be reserved"):
                os.posix_fallocate(self._file.fileno(), self._end, size)
            begin, self._end = self._end, self._end + size
        storage = buffer.untyped_storage()
        _places[storage._cdata] = _Place(self, begin, size)
        weakref.finalize(storage, self._forget, storage._cdata, size, begin).atexit = False
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Do nothing: the range is reused after the last reference to the buffer is gone."""

    def _forget(self, key: int, size: int, begin: int) -> None:
        del _places[key]
        self._unused[size].append(begin)

    def start_read(self, source: torch.Tensor, target: torch.Tensor, after: Jobs = ()) -> Jobs:
        """Start to read a whole buffer, after all writes to the buffer and the requests `after`.

        Args:
            target: page-aligned memory of whole pages, from HOST or pinned.
            after: requests that still use the target.
        """
        place = _place_of(source)
        assert place is not None
        after = [*after, *self._writes.get(place.begin, ())]
        return self._start(self._readers, os.preadv, place, target, after)

    def start_write(self, source: torch.Tensor, target: torch.Tensor) -> Jobs:
        """Start to write a whole buffer from page-aligned memory, after earlier writes to the buffer."""
        place = _place_of(target)
        assert place is not None
        after = self._writes.get(place.begin, ())
        jobs = self._writes[place.begin] = self._start(self._writers, os.pwritev, place, source, after)
        return jobs

    def _start(
        self, threads: ThreadPoolExecutor, call: _Call, place: _Place, memory: torch.Tensor, after: Jobs
    ) -> Jobs:
        pages = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage())
        assert len(pages) >= place.size and not memory.storage_offset(), "expected room for whole pages"
        view = pages[: place.size].numpy().data
        with self._lock:
            self.num_bytes_moved += place.size

        def transfer(begin: int) -> None:
            for job in after:
                job.result()
            part = view[begin : begin + _REQUEST_BYTES]
            self._transfer(self._direct.fileno(), call, part, place.begin + begin)

        return [threads.submit(transfer, begin) for begin in range(0, place.size, _REQUEST_BYTES)]

    def transfer_part(self, call: _Call, part: torch.Tensor, memory: torch.Tensor) -> None:
        """Read or write a part of a buffer through the page cache, after all writes that were started."""
        place = _place_of(part)
        assert place is not None and part.is_contiguous()
        for job in self._writes.get(place.begin, ()):
            job.result()
        begin = place.begin + int(part.storage_offset()) * part.itemsize
        if part.nbytes:
            view = memory.view(-1).view(torch.uint8).numpy().data
            self._transfer(self._file.fileno(), call, view, begin)
            os.posix_fadvise(self._file.fileno(), begin, len(view), os.POSIX_FADV_DONTNEED)

    def _transfer(self, descriptor: int, call: _Call, memory: memoryview, begin: int) -> None:
        what = "read" if call is os.preadv else "written"
        with self._failing(f"{size_text(len(memory))} at {begin} cannot be {what}"):
            while memory:
                if not (done := call(descriptor, [memory], begin)):
                    raise OSError(0, f"the file ends before, expected {self._end} bytes")
                memory, begin = memory[done:], begin + done

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise TrainingError(
                f"memory in {self.folder}: {what}: {error.strerror}. Checkpoints are not affected. Free "
                "space, check the disk, or choose another folder",
                field="offload_folder",
            ) from error


_Call = Callable[[int, list[memoryview], int], int]
"""os.preadv or os.pwritev."""


class _Place(NamedTuple):
    memory: DiskMemory
    begin: int
    size: int


_places: dict[int, _Place] = {}


def _place_of(tensor: torch.Tensor) -> _Place | None:
    return _places.get(tensor.untyped_storage()._cdata) if tensor.is_meta else None


def is_on_disk(value: object) -> bool:
    """Return whether a value is a tensor in a DiskMemory."""
    return isinstance(value, torch.Tensor) and _place_of(value) is not None


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in host memory: the tensor itself, or a copy of it from a device or a disk.

    Raises:
        TrainingError: the disk fails.
    """
    if (place := _place_of(tensor)) is None:
        return tensor.cpu()
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    place.memory.transfer_part(os.preadv, tensor, values)
    return values


def write_values(target: torch.Tensor, values: torch.Tensor) -> None:
    """Copy values to a tensor on a device, in host memory or on a disk.

    Raises:
        TrainingError: a disk fails.
    """
    if (place := _place_of(target)) is None:
        target.copy_(on_host(values) if values.is_meta else values)
    else:
        values = on_host(values).to(target.dtype).expand(target.shape).contiguous()
        place.memory.transfer_part(os.pwritev, target, values)
