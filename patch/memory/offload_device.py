"""The interface of an offload device (a device with too little memory), and the host memory that it uses."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import torch


class Allocator(Protocol):
    """Allocates flat buffers, and is told when the caller frees a buffer."""

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros."""

    def free(self, buffer: torch.Tensor) -> None:
        """Record that the caller frees a buffer, whose memory is freed with the last reference."""
        return


class TorchAllocator(Allocator):
    """Torch's own allocator of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros."""
        return torch.zeros(numel, dtype=dtype, device=self._device)


class HostAllocator(Allocator):
    """Pageable host memory in whole pages, which direct I/O needs; huge pages if the system has them."""

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros."""
        # Private: shared memory does not get huge pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        pages = mmap.mmap(-1, whole_pages(numel * dtype.itemsize), flags=flags)
        pages.madvise(mmap.MADV_DONTFORK)  # a forked copy would miss data that a disk read still writes
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # this kernel has no huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(pages, dtype=dtype)[:numel]


HOST = HostAllocator()


def whole_pages(num_bytes: int) -> int:
    """Round up to whole pages; at least one page."""
    return max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE


class _PinnedPages(mmap.mmap):
    """Pages that are registered with CUDA, and unregistered before they are unmapped.

    If an address stayed registered, CUDA would copy to the old pages after the system reuses the address.
    """

    address, device = 0, 0

    def register(self, address: int) -> None:
        """Pin the pages, which begin at `address`; raise MemoryError if the system cannot pin that much."""
        error_code = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        if error_code:
            with suppress(RuntimeError):  # this thread's next kernel reports the error as its own
                torch.ones((), device="cuda")
            raise MemoryError(
                f"{len(self)} bytes of host memory could not be pinned (cudaError {error_code}); "
                "leave more free, or lower --optimizer-offload-chunk-size or --cpu-offloading-num-layers"
            )
        self.address, self.device = address, torch.cuda.current_device()

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            with torch.cuda.device(self.device):  # the last reference may end in any thread
                torch.cuda.synchronize()  # copies may still use the pages
                torch.cuda.cudart().cudaHostUnregister(self.address)


def allocate_pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a (numel,) buffer of zeros in pinned memory, of exactly this size (torch rounds to 2 ** n).

    Raises:
        MemoryError: the system cannot pin that much memory.
    """
    size = max(1, numel * dtype.itemsize)
    pages = _PinnedPages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # at a fork Linux would copy pinned pages for the child
    buffer = torch.frombuffer(pages, dtype=dtype, count=numel)
    pages.register(buffer.data_ptr())
    return buffer


def host_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate (numel,) zeros in host memory that a device copies from and to at full speed.

    Raises:
        MemoryError: the system cannot pin that much memory.
    """
    if device.type == "cuda":
        return allocate_pinned(numel, dtype)
    return HOST.allocate(numel, dtype)


class PinnedAllocator(Allocator):
    """Host memory that a device copies from and to at full speed."""

    def __init__(self, device: OffloadDevice) -> None:
        self._device = device

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros."""
        return self._device.allocate_pinned(numel, dtype).zero_()


Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(source, target) pairs of equal shapes and dtypes."""


class Event(Protocol):
    """A point in a stream; a subset of torch.cuda.Event."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has reached the point."""

    def wait(self) -> None:
        """Make the current stream wait for the point; the calling thread does not block."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this point to `end`, another event of the device, after both."""


class Joinable(Protocol):
    """Unfinished work that the current stream can wait for, for example a collective."""

    def wait_stream(self) -> None:
        """Make the current stream, or on a CPU this thread, wait for the work."""


class OffloadDevice(Allocator, Protocol):
    """A device that buffers are offloaded from."""

    def set_device(self) -> None:
        """Make the device current in this thread; every thread that copies calls it first."""

    def allocate_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a (numel,) buffer of host memory that the device copies from and to at full speed."""

    def record_event(self, after: Sequence[Joinable] = ()) -> Event:
        """Record an event after all work queued on the current stream and all work in `after`."""

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        """Start copies to the host, after `after` and all earlier copies; return an event at their end."""

    def copy_to_device(self, copies: Copies, after: Event | None = None) -> Event:
        """Start copies to the device, after `after` if it is given; return an event at their end."""

    def run_aside(self, work: Callable[[], object], after: Sequence[Event]) -> Event:
        """Run kernels on a stream of their own, after `after`; return an event at their end."""

    def usable_bytes(self) -> int:
        """Return the bytes that this process may use on the device: bytes in use plus free bytes."""

    def pop_peak_bytes(self) -> int:
        """Return the peak bytes that this process used on the device since the last call."""

    def count_activations(self) -> AbstractContextManager[None]:
        """Return a context for forward and backward in which the peak includes saved activations."""

    def count(self, tensor: torch.Tensor) -> None:
        """Within `count_activations`, count a tensor's memory until it is freed.

        Only code that replaces the hooks of saved tensors calls it.
        """


def is_weight(tensor: torch.Tensor) -> bool:
    """Return whether the tensor is a parameter or a view of a parameter."""
    return isinstance(tensor, torch.nn.Parameter) or isinstance(tensor._base, torch.nn.Parameter)
