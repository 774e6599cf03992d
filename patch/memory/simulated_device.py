"""An offload device in CPU memory with a budget of bytes, for runs and tests of offload without a GPU."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from patch.memory.offload_device import Copies, Event, Joinable

UNLIMITED = sys.maxsize
"""The budget of a simulated device that never runs out of memory."""


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """An allocation exceeds the budget of a simulated device."""


class _FinishedEvent:
    """The event of work that has ended already."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self) -> None:
        """Nothing to wait for."""


class SimulatedDevice:
    """CPU memory with a budget; see OffloadDevice for the methods. Copies end before the call returns.

    Args:
        budget: bytes, or UNLIMITED. It is checked when a buffer is allocated and, inside
            `count_activations`, when autograd saves a tensor for backward.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.allocated_bytes = 0
        """Bytes of buffers and activations, and those that `reserve` counted."""
        self._peak_bytes = 0

    def set_device(self) -> None:
        """Do nothing: the CPU is always current."""

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are allocated elsewhere, for example weights and gradients.

        Raises:
            SimulatedOutOfMemory: the budget is exceeded; nothing is counted.
        """
        if self.allocated_bytes + num_bytes > self.budget:
            raise SimulatedOutOfMemory(
                f"{num_bytes} bytes do not fit on the simulated device: {self.allocated_bytes} are in use, "
                f"expected at most {self.budget} together (--simulated-device-memory)"
            )
        self.allocated_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.allocated_bytes)

    def release(self, num_bytes: int) -> None:
        """Stop counting bytes that `reserve` counted."""
        self.allocated_bytes -= num_bytes

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros.

        Raises:
            SimulatedOutOfMemory: the budget is exceeded.
        """
        self.reserve(numel * dtype.itemsize)
        return torch.zeros(numel, dtype=dtype)

    def free(self, buffer: torch.Tensor) -> None:
        """Stop counting a buffer."""
        self.release(buffer.nbytes)

    def allocate_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate pageable host memory: without a GPU, pinning it is of no use."""
        return torch.empty(numel, dtype=dtype)

    def record_event(self, after: Joinable | None = None) -> Event:
        """Wait for `after` at once; all other work of this thread has ended."""
        if after is not None:
            after.join()
        return _FinishedEvent()

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        """Copy at once."""
        return self.copy_to_device(copies)

    def copy_to_device(self, copies: Copies) -> Event:
        """Copy at once."""
        for source, target in copies:
            target.copy_(source)
        return _FinishedEvent()

    def usable_bytes(self) -> int:
        """The budget."""
        return self.budget

    def pop_peak_bytes(self) -> int:
        """The most bytes that were counted since the last call."""
        peak, self._peak_bytes = self._peak_bytes, self.allocated_bytes
        return peak

    @contextmanager
    def count_activations(self) -> Iterator[None]:
        """A context for forward and backward: tensors saved for backward count until autograd drops them.

        When the context ends, none of them is counted any more, even if an error keeps the graph alive.

        Raises:
            SimulatedOutOfMemory: at the tensor that exceeds the budget.
        """
        if self.budget == UNLIMITED:
            yield
            return
        counter = _SavedTensorCounter(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(counter.pack, counter.unpack):
                yield
        finally:
            counter.close()


class _SavedTensor:
    """Autograd's only reference to a tensor that it saved for backward."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _SavedTensorCounter:
    """Counts the bytes of tensors that autograd keeps for backward, until `close`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._num_bytes = 0
        self._is_closed = False

    def pack(self, tensor: torch.Tensor) -> _SavedTensor:
        """Count a tensor that autograd saves, until the returned object is deleted."""
        self._device.reserve(tensor.nbytes)
        self._num_bytes += tensor.nbytes
        saved = _SavedTensor(tensor)
        weakref.finalize(saved, self._drop, tensor.nbytes).atexit = False
        return saved

    def unpack(self, saved: _SavedTensor) -> torch.Tensor:
        """Return the tensor, for backward."""
        return saved.tensor

    def _drop(self, num_bytes: int) -> None:
        if not self._is_closed:
            self._device.release(num_bytes)
            self._num_bytes -= num_bytes

    def close(self) -> None:
        """Release all bytes that are still counted; tensors that autograd drops later change nothing."""
        self._device.release(self._num_bytes)
        self._is_closed = True
