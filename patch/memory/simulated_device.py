"""An offload device in CPU memory with a budget of bytes, for runs and tests of offload without a GPU."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from patch.memory.offload_device import Copies, Event, Joinable, is_weight

UNLIMITED = sys.maxsize
"""The budget of a simulated device that never runs out of memory."""


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """An allocation exceeds the budget of a simulated device."""


class _FinishedEvent:
    def __init__(self) -> None:
        self.time = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: the work has ended."""

    def wait(self) -> None:
        """Do nothing: the work has ended."""

    def elapsed_time(self, end: Any) -> float:
        """Return the milliseconds from this event to `end`."""
        return 1e3 * (end.time - self.time)


class SimulatedDevice:
    """CPU memory with a budget; see OffloadDevice for the methods. Copies end before the call returns.

    Args:
        budget: bytes, or UNLIMITED. It is checked when a buffer is allocated, and when autograd saves a
            tensor inside `count_activations`.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.allocated_bytes = 0
        """Bytes of buffers and activations, plus the bytes that `reserve` counted."""
        self._peak_bytes = 0
        self._counter: _StorageCounter | None = None

    def set_device(self) -> None:
        """Do nothing: the CPU is always current."""

    def reserve(self, num_bytes: int) -> None:
        """Count bytes that are allocated elsewhere, for example weights and gradients; negative: freed bytes.

        Raises:
            SimulatedOutOfMemory: the budget is exceeded; nothing is counted.
        """
        if num_bytes > 0 and self.allocated_bytes + num_bytes > self.budget:
            raise SimulatedOutOfMemory(
                f"{num_bytes} bytes do not fit on the simulated device: {self.allocated_bytes} are in use, "
                f"expected at most {self.budget} together (--simulated-device-memory)"
            )
        self.allocated_bytes += num_bytes
        self._peak_bytes = max(self._peak_bytes, self.allocated_bytes)

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros.

        Raises:
            SimulatedOutOfMemory: the budget is exceeded.
        """
        self.reserve(numel * dtype.itemsize)
        return torch.zeros(numel, dtype=dtype)

    def free(self, buffer: torch.Tensor) -> None:
        """Stop counting a buffer."""
        self.reserve(-buffer.nbytes)

    def allocate_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate pageable host memory: pinning needs a GPU."""
        return torch.empty(numel, dtype=dtype)

    def record_event(self, after: Sequence[Joinable] = ()) -> Event:
        """Wait for `after` at once. All other work of this thread has ended."""
        for work in after:
            work.wait_stream()
        return _FinishedEvent()

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        """Copy at once."""
        return self.copy_to_device(copies)

    def copy_to_device(self, copies: Copies, after: Event | None = None) -> Event:
        """Copy at once."""
        for source, target in copies:
            target.copy_(source)
        return _FinishedEvent()

    def run_aside(self, work: Callable[[], object], after: Sequence[Event]) -> Event:
        """Run `work` at once."""
        work()
        return _FinishedEvent()

    def usable_bytes(self) -> int:
        """Return the budget."""
        return self.budget

    def pop_peak_bytes(self) -> int:
        """Return the peak counted bytes since the last call."""
        peak, self._peak_bytes = self._peak_bytes, self.allocated_bytes
        return peak

    @contextmanager
    def count_activations(self) -> Iterator[None]:
        """Count the tensors that autograd saves in this context until their memory is freed.

        Each storage counts once. Weights do not count, because `reserve` has counted them. Counting stops
        when the context ends, even if an error keeps the graph alive.

        Raises:
            SimulatedOutOfMemory: a saved tensor exceeds the budget.
        """
        if self.budget == UNLIMITED:
            yield
            return
        self._counter = _StorageCounter(self)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
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
        return tensor.detach()  # the original tensor would keep its own graph alive


class _StorageCounter:
    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._storages = weakref.WeakValueDictionary[int, torch.UntypedStorage]()
        self._sizes: dict[int, int] = {}

    def count(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            self._storages[storage._cdata] = storage
            weakref.finalize(storage, self._drop, storage._cdata).atexit = False
        # Recomputation frees the memory of a storage and allocates it again.
        sizes = {key: each.nbytes() for key, each in self._storages.items()}
        self._device.reserve(sum(sizes.values()) - sum(self._sizes[key] for key in sizes))
        self._sizes |= sizes

    def _drop(self, key: int) -> None:
        self._storages.pop(key, None)
        self._device.reserve(-self._sizes.pop(key, 0))

    def close(self) -> None:
        self._device.reserve(-sum(self._sizes.values()))
        self._sizes.clear()
        self._storages.clear()
