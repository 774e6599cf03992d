"""A GPU as an offload device: copies between it and pinned memory run on separate streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from patch.device import stream_of, streams_of
from patch.memory.offload_device import Copies, Event, Joinable, allocate_pinned


class Fragmentation:
    """An estimate of the bytes lost to fragmentation, from the allocator's statistics of each step.

    The allocator caches freed memory. So reserved minus allocated bytes measures fragmentation only in a
    step that begins with an empty cache.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._has_freed_memory = True
        """Whether the allocator caches freed memory, so that the next step cannot be measured."""

    def invalidate(self) -> None:
        """Record that memory was freed, which the allocator caches."""
        self._has_freed_memory = True

    def update(self, max_allocated: int, max_reserved: int) -> bool:
        """Update the estimate after a step with its peaks of allocated and reserved bytes.

        Returns:
            whether the caller should empty the allocator's cache, so that the next step can be measured.
        """
        had_freed_memory = self._has_freed_memory
        self._has_freed_memory = False
        self.num_bytes = 0 if had_freed_memory else max_reserved - max_allocated
        return had_freed_memory


class CudaDevice:
    """A GPU; see OffloadDevice for the methods.

    Args:
        what: name of the offloaded data. Each name has its own copy streams.
        beside: the same GPU under another name, if both count their freed memory together.
    """

    def __init__(
        self, device: torch.device, what: str = "states", beside: CudaDevice | None = None
    ) -> None:
        self.device = device
        self._fragmentation: Fragmentation = beside._fragmentation if beside else Fragmentation()
        self._streams = streams_of(device)
        self._d2h_stream, self._h2d_stream, self._join_stream, self._aside_stream = (
            stream_of(device, f"{what}: {purpose}")
            for purpose in ("to host", "to device", "reductions", "aside")
        )

    def set_device(self) -> None:
        """Make the GPU current in this thread.

        Otherwise the end of a stream context would make GPU 0 current and create a CUDA context there.
        """
        self._streams.set_device(self.device)

    def allocate(self, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate a buffer of (numel,) zeros. Copies to the buffer wait until it is zeroed."""
        buffer = torch.zeros(numel, dtype=dtype, device=self.device)
        self._h2d_stream.wait_stream(self._streams.current_stream(self.device))
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Record that torch's allocator caches the buffer's memory; see Fragmentation."""
        self._fragmentation.invalidate()

    def allocate_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a (numel,) buffer of pinned memory, without rounding up its size."""
        return allocate_pinned(numel, dtype)

    def record_event(self, after: Sequence[Joinable] = ()) -> Event:
        """Record on the current stream, or with `after` on a separate stream: compute does not wait."""
        compute = self._streams.current_stream(self.device)
        if not after:
            return compute.record_event(self._streams.Event(enable_timing=True))
        self._join_stream.wait_stream(compute)
        with self._streams.stream(self._join_stream):
            for work in after:
                work.wait_stream()
        return self._join_stream.record_event()

    def copy_to_host(self, copies: Copies, after: Event) -> Event:
        """Copy on the device-to-host stream, in call order: start copies in the order of their events."""
        return self._copy(copies, self._d2h_stream, after)

    def copy_to_device(self, copies: Copies, after: Event | None = None) -> Event:
        """Copy on the host-to-device stream, in call order."""
        return self._copy(copies, self._h2d_stream, after)

    def run_aside(self, work: Callable[[], object], after: Sequence[Event]) -> Event:
        """Run `work` on a stream of its own, in call order."""
        with self._streams.stream(self._aside_stream):
            for event in after:
                event.wait()
            work()
        return self._aside_stream.record_event()

    def usable_bytes(self) -> int:
        """Return the bytes that are free or reserved by torch, minus bytes lost to fragmentation."""
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - self._fragmentation.num_bytes

    def pop_peak_bytes(self) -> int:
        """Return the peak bytes that torch allocated since the last call."""
        peak = torch.cuda.max_memory_allocated(self.device)
        if self._fragmentation.update(peak, torch.cuda.max_memory_reserved(self.device)):
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def count_activations(self) -> AbstractContextManager[None]:
        """Do nothing: torch's allocator counts activations."""
        return nullcontext()

    def count(self, tensor: torch.Tensor) -> None:
        """Do nothing: torch's allocator counts activations."""

    def _copy(self, copies: Copies, stream: torch.cuda.Stream, after: Event | None) -> Event:
        with self._streams.stream(stream):
            if after is not None:
                after.wait()
            for source, target in copies:
                target.copy_(source, non_blocking=True)
        # A thread that waits for a blocking event sleeps, so that the Adam kernel can use its core.
        return stream.record_event(self._streams.Event(blocking=True, enable_timing=True))
