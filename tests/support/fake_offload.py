"""The optimizer on a fake device: its own streams and copies, host threads that run late, both kernels.

    with on(FakeDevice(order)) as kernel:      all that is built and used inside works on that device
        offload = Offload(FakeOffloadDevice(fake), ...)

The host's worker threads are adversaries too: a job runs when its result is awaited, or at a random time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fake_device import FakeDevice
from torch.utils._pytree import tree_leaves

from patch.distributed import async_collectives
from patch.distributed.async_collectives import CommHandle
from patch.memory import staged_copy
from patch.memory.cuda_device import CudaDevice
from patch.optimizer import grad_norm
from patch.optimizer.buckets import buffer_group, flat_params, fp8_params, micro_batch, param_buffer
from patch.optimizer.kernels import sums_by_norms
from patch.optimizer.kernels.cpp_adam import CppAdam
from patch.optimizer.kernels.numpy_adam import NumpyAdam
from patch.optimizer.kernels.spec import AdamKernel, UpdateItem
from patch.optimizer.states import host_update, hybrid_adam
from patch.optimizer.zero3 import sharded_params


@contextmanager
def on(fake: FakeDevice) -> Iterator[HostKernel]:
    """Let the optimizer that is built and used inside work on the fake device."""
    kernel = HostKernel(fake)
    with ExitStack() as stack:
        for module in (host_update, staged_copy):
            stack.enter_context(mock.patch.object(module, "ThreadPoolExecutor", Workers(fake)))
        stack.enter_context(mock.patch.object(host_update, "adam_kernel", lambda device: kernel))
        stack.enter_context(mock.patch.object(hybrid_adam, "adam_kernel", lambda device: _DeviceKernel(fake)))
        stack.enter_context(mock.patch.object(staged_copy, "_STAGING_BYTES", 128))
        stack.enter_context(collectives_of(fake))
        stack.enter_context(fake)
        yield kernel


@contextmanager
def collectives_of(fake: FakeDevice) -> Iterator[None]:
    """Put messages on the fake device's streams, and compute the norm with torch operators, which it sees."""
    with (
        mock.patch.object(grad_norm, "sums_of_squares", sums_by_norms),
        mock.patch.object(async_collectives, "follows_on_device", lambda group: True),
        mock.patch.object(micro_batch, "start_all_reduce", partial(_start_count, fake)),
        mock.patch.object(buffer_group, "start_all_reduce", fake.start_all_reduce),
        mock.patch.object(buffer_group, "start_reduce_scatter", fake.start_reduce_scatter),
        mock.patch.object(flat_params, "start_all_gather", fake.start_all_gather),
        mock.patch.object(sharded_params, "start_all_gather", fake.start_all_gather),
        mock.patch.object(sharded_params, "resize_memory", _resize_memory),
        mock.patch.object(buffer_group, "host_zeros", partial(_host_zeros, fake)),
        mock.patch.object(param_buffer, "all_or_none", nullcontext),
        mock.patch.object(
            buffer_group, "same_ranks", lambda group: dist.ProcessGroup(group.rank(), group.size())
        ),
        mock.patch.object(fp8_params, "start_all_reduce", fake.start_all_reduce),
    ):
        yield


def _start_count(fake: FakeDevice, buffer: torch.Tensor, group: Any) -> CommHandle:
    """Start the count of ranks. A process that is really alone counts itself once."""
    op = dist.ReduceOp.MAX if group.size() == 1 else dist.ReduceOp.SUM
    return fake.start_all_reduce(buffer, group, op)


def _host_zeros(fake: FakeDevice, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return fake.pinned(numel, dtype).zero_()


def _resize_memory(tensor: torch.Tensor, num_bytes: int) -> None:
    """Resize in stream order like CUDA's allocator: the content is undefined before and after."""
    tensor.data.fill_(float("nan") if tensor.is_floating_point() else 0)


class FakeOffloadDevice(CudaDevice):
    """The product's streams and copies on a fake device."""

    def __init__(self, fake: FakeDevice, what: str = "states") -> None:
        super().__init__(torch.device("cpu"), what)
        self._fake = fake

    def allocate_pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._fake.pinned(numel, dtype)

    def usable_bytes(self) -> int:
        return 1 << 40

    def pop_peak_bytes(self) -> int:
        return 0


class _DeviceKernel(AdamKernel):
    """Adam on the current stream."""

    def __init__(self, fake: FakeDevice) -> None:
        self._fake, self._kernel = fake, NumpyAdam()

    def update(self, items: Sequence[UpdateItem]) -> None:
        self._fake.current_stream().queue(lambda: self._kernel.update(items))


class HostKernel:
    """Adam on the host, which must not touch device memory. `numels` lists the sizes of its updates."""

    def __init__(self, fake: FakeDevice) -> None:
        self._fake, self._kernel = fake, CppAdam()
        self.numels: list[int] = []
        self.faults = 0
        self.failure: Exception | None = None

    def update(self, items: Sequence[UpdateItem]) -> None:
        if self.failure is not None:
            raise self.failure
        touched = [t for s in items for t in tree_leaves(s) if isinstance(t, torch.Tensor)]
        self.faults += any(map(self._fake.holds, touched))
        self.numels.append(sum(item.grad.numel() for item in items))
        with self._fake.executing():
            self._kernel.update(items)


class Workers:
    """`ThreadPoolExecutor`s whose jobs run in order, when their result is awaited, or at a random time."""

    def __init__(self, fake: FakeDevice) -> None:
        self._fake = fake

    def __call__(
        self, max_workers: int, name: str, initializer: Callable[[], object] = lambda: None
    ) -> _Worker:
        return _Worker(self._fake, initializer)


class _Worker:
    def __init__(self, fake: FakeDevice, initializer: Callable[[], object]) -> None:
        self.fake, self._initializer = fake, initializer
        self.jobs: deque[tuple[_Job, Callable[..., Any], tuple]] = deque()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> _Job:
        while self.jobs and self.fake.chance():
            self.run_next()
        job = _Job(self)
        self.jobs.append((job, function, arguments))
        return job

    def run_next(self) -> None:
        job, function, arguments = self.jobs.popleft()
        if job.running() or job.set_running_or_notify_cancel():
            try:
                with self.fake.in_thread(self):
                    self._initializer()
                    job.set_result(function(*arguments))
            except Exception as error:
                job.set_exception(error)


class _Job(Future):
    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self._worker = worker

    def result(self, timeout: float | None = None) -> Any:
        while not super().done():
            self._worker.run_next()
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        while not super().done():
            self._worker.run_next()
        return super().exception()

    def cancel(self) -> bool:
        """Fail at random: the worker has just begun the job, and got no further."""
        worker = self._worker
        if worker.jobs and worker.jobs[0][0] is self and not self.running() and worker.fake.chance():
            self.set_running_or_notify_cancel()
        return super().cancel()

    def done(self) -> bool:
        while not super().done() and self._worker.fake.chance():
            self._worker.run_next()
        return super().done()
