"""Pinned host memory of exactly the requested size; torch's own allocator rounds up to a power of two."""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch


class _PinnedPages(mmap.mmap):
    """Pages that are registered with CUDA, and unregistered before they are unmapped.

    If their address stayed registered, CUDA would copy to the old pages after the system has mapped others
    at the same address.
    """

    address, device = 0, 0

    def register(self, address: int) -> None:
        """Pin the pages, which begin at `address`.

        Raises:
            MemoryError: the system cannot pin that much memory.
        """
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
            with torch.cuda.device(self.device):  # whichever thread has dropped the last reference
                torch.cuda.synchronize()  # copies may still use the pages
                torch.cuda.cudart().cudaHostUnregister(self.address)


def allocate_pinned(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate an uninitialised (numel,) buffer of pinned host memory.

    Raises:
        MemoryError: the system cannot pin that much memory.
    """
    size = max(1, numel * dtype.itemsize)
    pages = _PinnedPages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_DONTFORK)  # at a fork Linux would copy pinned pages for the child
    buffer = torch.frombuffer(pages, dtype=dtype, count=numel)
    pages.register(buffer.data_ptr())
    return buffer
