"""What an offload device is: a device whose memory is scarce, so that buffers leave it for host memory.

CudaDevice         a GPU: copies run on streams of their own, from and to pinned memory
SimulatedDevice    CPU memory with a budget, for runs and tests of offload without a GPU
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from patch.memory.allocators import Allocator

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(source, target) pairs of equal shapes and types."""


class Event(Protocol):
    """A point in a stream; a subset of torch.cuda.Event."""

    def synchronize(self) -> None:
        """Block the calling thread until the stream has reached the point."""

    def wait(self) -> None:
        """Make the current stream wait for the point; the calling thread goes on."""


class Joinable(Protocol):
    """Work under way that the current stream can wait for, for example a collective."""

    def join(self) -> None:
        """Make the current stream, or on a CPU this thread, wait for the work."""


class OffloadDevice(Allocator, Protocol):
    """A device that buffers are offloaded from."""

    def set_device(self) -> None:
        """Make the device the current one of this thread; every thread that copies calls it first."""

    def allocate_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a (numel,) buffer of host memory that copies reach at full speed."""

    def record_event(self, after: Joinable | None = None) -> Event:
        """Record the end of all work queued on the current stream, and of `after`."""

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        """Start copies to the host that wait for `after`, and for all earlier copies to the host.

        Returns:
            the end of the copies.
        """

    def copy_to_device(self, copies: Copies) -> Event:
        """Start copies to the device at once.

        Returns:
            the end of the copies.
        """

    def usable_bytes(self) -> int:
        """Bytes that this process may hold on the device: those it holds already and those that are free."""

    def pop_peak_bytes(self) -> int:
        """The most bytes that this process held on the device since the last call."""

    def count_activations(self) -> AbstractContextManager[None]:
        """A context for forward and backward, so that what they hold shows in the peak."""
