"""An offload device in CPU memory with a budget of bytes, for runs and tests of offload without a GPU."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from patch.memory.offload_device import Copies, Event, Joinable, is_weight

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
        self._counter: _StorageCounter | None = None
        """The counter of the current `count_activations`."""

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

    def record_event(self, after: Sequence[Joinable] = ()) -> Event:
        """Wait for `after` at once; all other work of this thread has ended."""
        for work in after:
            work.join()
        return _FinishedEvent()

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        """Copy at once."""
        return self.copy_to_device(copies)

    def copy_to_device(self, copies: Copies, after: Event | None = None) -> Event:
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
        """A context for forward and backward: what autograd saves counts until its memory is freed.

        Each storage counts once; weights do not, since `reserve` has counted them. When the context ends,
        nothing is counted any more, even if an error keeps the graph alive.

        Raises:
            SimulatedOutOfMemory: at the tensor that exceeds the budget.
        """
        if self.budget == UNLIMITED:
            yield
            return
        self._counter = _StorageCounter(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _itself):
                yield
        finally:
            self._counter.close()
            self._counter = None

    def count(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory until it is freed.

        Raises:
            SimulatedOutOfMemory: the budget is exceeded.
        """
        if self._counter is not None and not is_weight(tensor):
            self._counter.count(tensor.untyped_storage())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count(tensor)
        return tensor.detach()  # the tensor itself would refer to its own graph


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class _StorageCounter:
    """Counts the bytes of storages until they are freed, or until `close`."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        """The counted sizes, by the storage's address."""

    def count(self, storage: torch.UntypedStorage) -> None:
        """Count a storage, unless it is counted."""
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            self._storages[storage._cdata] = weakref.ref(storage)
            weakref.finalize(storage, self._drop, storage._cdata).atexit = False
        self._measure()

    def _measure(self) -> None:
        """Count what the storages have now: recomputation frees memory and gives it back to them."""
        sizes = {key: storage.nbytes() for key, ref in self._storages.items() if (storage := ref())}
        grown = sum(sizes.values()) - sum(self._sizes[key] for key in sizes)
        if grown > 0:
            self._device.reserve(grown)
        else:
            self._device.release(-grown)
        self._sizes |= sizes

    def _drop(self, key: int) -> None:
        self._storages.pop(key, None)
        self._device.release(self._sizes.pop(key, 0))

    def close(self) -> None:
        """Release all bytes that are still counted; storages that are freed later change nothing."""
        self._device.release(sum(self._sizes.values()))
        self._sizes, self._storages = {}, {}
