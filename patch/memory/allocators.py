"""Where buffers come from: torch's memory of a device, or pageable host memory in huge pages."""

from __future__ import annotations

import mmap
from typing import Protocol

import torch


class Allocator(Protocol):
    """Allocates flat buffers, and is told when a caller gives one up."""

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros."""

    def free(self, buffer: torch.Tensor) -> None:
        """Record that the caller gives up a buffer; its memory is freed with the last reference."""


class TorchAllocator:
    """Torch's own allocator of one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros."""
        return torch.zeros(numel, dtype=dtype, device=self._device)

    def free(self, buffer: torch.Tensor) -> None:
        """Do nothing: torch counts references."""


class HostAllocator:
    """Pageable host memory of exactly the requested size, in huge pages if the system has them."""

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros."""
        # Private: shared memory does not get huge pages.
        pages = mmap.mmap(-1, max(1, numel * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                pages.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # this kernel has no huge pages
                pass
        return torch.frombuffer(pages, dtype=dtype, count=numel)

    def free(self, buffer: torch.Tensor) -> None:
        """Do nothing: the pages are unmapped with the buffer."""


HOST = HostAllocator()
