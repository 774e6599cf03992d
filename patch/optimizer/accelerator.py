"""The device that chunks are offloaded from: its memory, its Adam kernel, and copies beside its compute.

    CudaAccelerator        a GPU: copies run on streams of their own, from and to pinned memory
    SimulatedAccelerator   CPU memory with a budget, so that placement is trained and tested without a GPU

A `Mark` is a point in a stream: the host, or another stream, waits for it.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from patch.device import streams_of
from patch.distributed.async_collectives import Pending
from patch.optimizer.fragments import Fragments
from patch.optimizer.kernels import AdamKernel, adam_kernel
from patch.optimizer.kernels.numpy_adam import NumpyAdam

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""(source, target) of equal shapes and types."""


class Mark(Protocol):
    """The end of some work."""

    def synchronize(self) -> None:
        """Let the host wait for it."""

    def wait(self) -> None:
        """Let the current stream wait for it; the host goes on."""


class Accelerator(Protocol):
    """What chunks need of the device they may leave."""

    kernel: AdamKernel

    def enter(self) -> None:
        """Make the device the current one of this thread; each that copies begins with it."""

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(numel,) zeros on the device."""

    def free(self, buffer: torch.Tensor) -> None:
        """Take note that a buffer is given up."""

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) host memory, exactly that much, that copies go to and from at full speed."""

    def mark(self, after: Pending | None = None) -> Mark:
        """The end of what compute has been given, and of the collective `after`."""

    def to_host(self, copies: Copies, after: Mark) -> Mark:
        """Copy when `after` is done, and all copies to the host that were asked for before."""

    def to_device(self, copies: Copies) -> Mark:
        """Copy at once."""

    def usable_bytes(self) -> int:
        """What this process may hold on the device in all."""

    def take_peak(self) -> int:
        """The largest number of bytes that this process held on the device since the last call."""

    def activations(self) -> AbstractContextManager[None]:
        """Around forward and backward: what they hold counts."""


class _PinnedPages(mmap.mmap):
    """Memory of its own pages that CUDA may copy from and to; it is told when they are given back.

    Left registered, their addresses would still lead copies to the old pages when others are mapped there.
    """

    address = 0

    def register(self, address: int) -> None:
        """Pin the pages, which begin at `address`.

        Raises:
            MemoryError: the system has not enough memory that can be pinned.
        """
        failed = int(torch.cuda.cudart().cudaHostRegister(address, len(self), 0))
        if failed:
            raise MemoryError(
                f"{len(self)} bytes of host memory could not be pinned (cudaError {failed}); "
                "leave more of it free, or lower --optimizer-offload-chunk-size"
            )
        self.address = address

    def __del__(self) -> None:
        if self.address and not sys.is_finalizing():
            torch.cuda.synchronize()  # copies may be under way
            torch.cuda.cudart().cudaHostUnregister(self.address)


class CudaAccelerator:
    """A GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kernel = adam_kernel(device)
        self._fragments = Fragments()
        self._streams = streams_of(device)
        self._down, self._up, self._aside = (self._streams.Stream(device) for _ in range(3))

    def enter(self) -> None:
        """Leaving a stream's block would make GPU 0 current otherwise, and cost its memory for a context."""
        self._streams.set_device(self.device)

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(numel,) zeros on the device."""
        buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        self._up.wait_stream(self._streams.current_stream(self.device))  # before any copy to it
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Torch's allocator keeps count, and the memory."""
        self._fragments.forget()

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Registered pages: torch's own pinned memory rounds up to a power of two."""
        size = max(1, numel * dtype.itemsize)
        pages = _PinnedPages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)  # Linux would copy pinned pages for a child, at once
        buffer = torch.frombuffer(pages, dtype=dtype, count=numel)
        pages.register(buffer.data_ptr())
        return buffer

    def mark(self, after: Pending | None = None) -> Mark:
        """Compute goes on beside a collective, so another stream waits for both."""
        compute = self._streams.current_stream(self.device)
        if after is None:
            return compute.record_event()
        self._aside.wait_stream(compute)
        with self._streams.stream(self._aside):
            after.join()
        return self._aside.record_event()

    def to_host(self, copies: Copies, after: Mark) -> Mark:
        """Copy on the downward stream. It waits for no later mark than this: a stream is a queue."""
        with self._streams.stream(self._down):
            after.wait()
        return self._copy(copies, self._down)

    def to_device(self, copies: Copies) -> Mark:
        """Copy on the upward stream."""
        return self._copy(copies, self._up)

    def usable_bytes(self) -> int:
        """What is free, and what torch holds already, less fragments."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - self._fragments.num_bytes

    def take_peak(self) -> int:
        """Of what torch has allocated."""
        peak = torch.cuda.max_memory_allocated(self.device)
        if self._fragments.learn(peak, torch.cuda.max_memory_reserved(self.device)):
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def activations(self) -> AbstractContextManager[None]:
        """Nothing: torch's allocator keeps count."""
        return nullcontext()

    def _copy(self, copies: Copies, stream: torch.cuda.Stream) -> Mark:
        with self._streams.stream(stream):
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        # Whoever waits for it sleeps: the kernel's other threads have work for the core.
        return stream.record_event(self._streams.Event(blocking=True))


UNLIMITED = sys.maxsize
"""The budget of a simulated device that may hold everything."""


class SimulatedOutOfMemory(torch.OutOfMemoryError):
    """The simulated device's budget is exceeded."""


class _Done:
    """The mark of what is done at once."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def wait(self) -> None:
        """Nothing to wait for."""


class SimulatedAccelerator:
    """A device in host memory with a budget of bytes.

    Its kernel is not the one of chunks on the host, so that equal weights mean something.

    Args:
        budget: bytes, or UNLIMITED. It is checked when buffers are made and, inside `activations`, when
            autograd saves a tensor for backward.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.kernel: AdamKernel = NumpyAdam()
        self.held = self._peak = 0
        """Bytes held by buffers, and by what `hold` was told."""

    def enter(self) -> None:
        """Nothing: there is one."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes that others made or gave up (weights, gradients, activations).

        Raises:
            SimulatedOutOfMemory: more than the budget.
        """
        if num_bytes > 0 and self.held + num_bytes > self.budget:
            raise SimulatedOutOfMemory(
                f"{self.held} bytes in use and {num_bytes} more, expected at most {self.budget} "
                "(--simulated-device-memory)"
            )
        self.held += num_bytes
        self._peak = max(self._peak, self.held)

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """(numel,) zeros, counted."""
        self.hold(numel * dtype.itemsize)
        return torch.zeros(numel, dtype=dtype)

    def free(self, buffer: torch.Tensor) -> None:
        """Count a buffer no more."""
        self.hold(-buffer.nbytes)

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) of host memory."""
        return torch.empty(numel, dtype=dtype)

    def mark(self, after: Pending | None = None) -> Mark:
        """Wait for the collective: this thread's work is done."""
        if after is not None:
            after.join()
        return _Done()

    def to_host(self, copies: Copies, after: Mark) -> Mark:
        """Copy at once."""
        return self.to_device(copies)

    def to_device(self, copies: Copies) -> Mark:
        """Copy at once."""
        for source, target in copies:
            target.copy_(source)
        return _Done()

    def usable_bytes(self) -> int:
        """The budget."""
        return self.budget

    def take_peak(self) -> int:
        """The most that was held since the last call."""
        peak, self._peak = self._peak, self.held
        return peak

    @contextmanager
    def activations(self) -> Iterator[None]:
        """Around forward and backward: what autograd saves for backward counts until it is used.

        Raises:
            SimulatedOutOfMemory: at the tensor that exceeds the budget.
        """
        if self.budget == UNLIMITED:
            yield
            return
        saved = [0]

        def count(num_bytes: int) -> None:
            if saved:
                self.hold(num_bytes)
                saved[0] += num_bytes

        try:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: _Saved(t, count), _Saved.take):
                yield
        finally:
            self.hold(-saved.pop())  # of a graph that outlives an error; its end counts no more


class _Saved:
    """A tensor saved for backward, counted until autograd forgets it."""

    def __init__(self, tensor: torch.Tensor, count: Callable[[int], None]) -> None:
        count(tensor.nbytes)
        self._tensor, self._count = tensor, count

    def take(self) -> torch.Tensor:
        """The tensor, for backward."""
        return self._tensor

    def __del__(self) -> None:
        if hasattr(self, "_count"):  # it was counted
            self._count(-self._tensor.nbytes)
