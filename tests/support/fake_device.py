"""Device on the CPU that keeps CUDA's order: streams are queues, and the host runs ahead of them.

Inside `with device:` a torch operation on the device's tensors is only queued on the current stream. It reads
and writes its tensors when it *executes*; until then its result is NaN. An adversary decides what executes
when. It keeps CUDA's two promises: a stream executes in order, and it waits for events.

    LATE             nothing before the host waits for it, and then no more than necessary
    COPIES_FIRST     every stream but the compute stream as early as possible
    COMPUTE_FIRST    the compute stream as early as possible, everything else late
    a seed           a random interleaving
    AT_ONCE          everything at the call: no adversary, the reference

All of this happens in one thread, so that a test is reproducible. The work of another thread is done inside
`in_thread`; that thread has no device before it calls `set_device`.

Streams come from a pool in turn. Each process group's messages have a stream of it, as with torch and NCCL.
The pool is small, so code that takes a stream for each call soon shares one with other work.

With `reuses_memory` the compute stream overwrites memory as soon as the host has freed it, as torch's
allocator gives it to the next operation queued there.

The device has the interface of `torch.cuda` that the project needs, and replaces it within `with device:`.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from patch.device import stream_of
from patch.distributed.async_collectives import CommHandle

POOL = 12
"""Number of streams. The project needs fewer: one per purpose, and one per process group."""
LATE, COPIES_FIRST, COMPUTE_FIRST, AT_ONCE = "late", "copies first", "compute first", "at once"
Order = str | int


class Event:
    def __init__(self, blocking: bool = False, enable_timing: bool = False) -> None:
        self.stream: Stream | None = None
        self.position = 0
        self.milliseconds = 0.0

    def elapsed_time(self, end: Event) -> float:
        assert self.query() and end.query()
        return end.milliseconds - self.milliseconds

    def record(self, stream: Stream) -> None:
        stream.record_event(self)

    def query(self) -> bool:
        return self.stream is None or self.stream.num_done >= self.position

    def synchronize(self) -> None:
        if self.stream is not None:
            self.stream.run_to(self.position)

    def wait(self, stream: Stream | None = None) -> None:
        assert self.stream is not None
        (stream or self.stream.device.current_stream()).wait_event(self)


class Stream:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.tasks: deque[Callable[[], Any] | Event] = deque()
        self.num_done = 0

    def queue(self, task: Callable[[], Any] | Event) -> None:
        self.tasks.append(task)
        self.device.tick()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.stream, event.position = self, self.num_done + len(self.tasks)
        return event

    def wait_event(self, event: Event) -> None:
        self.queue(event)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.run_to(self.num_done + len(self.tasks))

    def run_to(self, position: int) -> None:
        """Execute only what is needed to reach a position."""
        while self.num_done < position:
            if isinstance(self.tasks[0], Event):
                self.tasks[0].synchronize()
            self.step()

    def step(self) -> bool:
        """Execute the next task; return False if it must wait, or if there is none."""
        if not self.tasks or (isinstance(self.tasks[0], Event) and not self.tasks[0].query()):
            return False
        task = self.tasks.popleft()
        if not isinstance(task, Event):
            with self.device.executing():
                task()
        self.num_done += 1
        return True


class FakeDevice(TorchDispatchMode):
    """The device; see the module's docstring.

    Args:
        order: when tasks execute.
        reuses_memory: whether freed memory is overwritten.
    """

    def __init__(self, order: Order, *, reuses_memory: bool = False) -> None:
        super().__init__()
        self.order, self._reuses_memory = order, reuses_memory
        self._freed: set[int] = set()
        self._random = random.Random(order)
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._pinned: dict[int, torch.UntypedStorage] = {}
        """Both dicts hold their storages, so that no address is used twice."""
        self._is_executing = self._is_ticking = False
        self.compute = self._current = Stream(self)
        self._others: list[Stream] = []
        self._num_taken = 0
        self._comms: dict[Any, Stream] = {}
        self._thread: object = None
        """Thread whose work is being done, or None for the running thread."""
        self._with_device: set[object] = {threading.current_thread()}
        self._entered = ExitStack()

    def __enter__(self) -> FakeDevice:
        stream_of.cache_clear()
        self._entered.callback(stream_of.cache_clear)
        self._entered.enter_context(mock.patch.object(torch, "get_device_module", lambda device=None: self))
        self._entered.enter_context(mock.patch.object(torch.Tensor, "tolist", self._numbers))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered.close()

    # Interface of torch.cuda.

    Event = Event

    def Stream(self, device: torch.device | None = None) -> Stream:  # noqa: N802
        if len(self._others) < POOL:
            self._others.append(Stream(self))
        self._num_taken += 1
        return self._others[(self._num_taken - 1) % POOL]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        assert self.has_device(), "a context on GPU 0: this thread has not called set_device"
        return self._current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._current = self.current_stream(), stream
        try:
            yield
        finally:
            self._current = before

    def is_initialized(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device | int) -> None:
        self._with_device.add(self._thread or threading.current_thread())

    @property
    def _numbers(self) -> Callable[[torch.Tensor], Any]:
        """Return `Tensor.tolist` after a wait of the host: torch reads the memory without an operation."""
        read = torch.Tensor.tolist

        def numbers(tensor: torch.Tensor) -> Any:
            if self.holds(tensor):
                self._current.synchronize()
            return read(tensor)

        return numbers

    # Threads.

    @contextmanager
    def in_thread(self, thread: object) -> Iterator[None]:
        """Within the context, all work counts as the work of another thread, which `thread` identifies."""
        before = self._thread, self._current
        self._thread, self._current = thread, self.compute
        try:
            yield
        finally:
            self._thread, self._current = before

    def has_device(self) -> bool:
        return (self._thread or threading.current_thread()) in self._with_device

    # When tasks execute.

    def tick(self) -> None:
        """Execute what the adversary chooses, after a task was queued."""
        if self._is_ticking:
            return
        self._is_ticking = True
        if self.order == COPIES_FIRST:
            self.run_others()
        elif self.order == COMPUTE_FIRST:
            self.compute.synchronize()
        elif self.order == AT_ONCE:
            for stream in (self.compute, *self._others):
                stream.synchronize()
        elif self.order != LATE:
            for _ in range(self._random.choice((0, 0, 1, 2, 8))):
                self._random.choice([self.compute, *self._others]).step()
        self._is_ticking = False

    def chance(self) -> bool:
        """Return whether a worker that may go on does so now."""
        return isinstance(self.order, int) and self._random.random() < 0.3

    def run_others(self) -> None:
        """Execute all that can execute while the compute stream does not proceed."""
        while any([stream.step() for stream in self._others]):
            pass

    @contextmanager
    def executing(self) -> Iterator[None]:
        """Within the context, operations execute at once."""
        before, self._is_executing = self._is_executing, True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_executing = before

    # Memory.

    def adopt(self, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._storages[storage.data_ptr()] = storage

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._storages

    def pinned(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.frombuffer(
            bytearray(b"\xff" * max(1, numel * dtype.itemsize)), dtype=dtype, count=numel
        )
        self._pinned[buffer.untyped_storage().data_ptr()] = buffer.untyped_storage()
        return buffer

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    # Operations.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _tensors((args, kwargs))
        if self._is_executing or (tensors and not any(map(self.holds, tensors))):
            return func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default:
            return self._copy(*args)
        if func.namespace == "c10d" or func in _FOR_THE_HOST:
            self._current.synchronize()
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if written:
            assert all(map(self.holds, written)), f"{func} writes to the host"
            self._queue(func, args, kwargs)
            return written[0] if len(func._schema.returns) == 1 else written
        # Views, and results of which only the shape is known.
        results = func(*args, **kwargs)
        own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        fresh = [r for r in _tensors(results) if r.untyped_storage().data_ptr() not in own]
        if fresh:
            self.adopt(fresh)
            for result in fresh:
                result.fill_(float("nan") if result.is_floating_point() else 0)
            self._queue(func, args, kwargs, [result.data for result in fresh])
        return results

    def _queue(self, func: Any, args: Any, kwargs: Any, into: Sequence[torch.Tensor] = ()) -> None:
        args, kwargs, into = tree_map(self._place_of, (args, kwargs, list(into)))

        def execute() -> None:
            own_args, own_kwargs, targets = tree_map(_tensor_at, (args, kwargs, into))
            results = _tensors(func(*own_args, **own_kwargs))
            for target, result in zip(targets, results if targets else (), strict=True):
                target.copy_(result)

        self._overwrite_freed()
        self._current.queue(execute)

    def _place_of(self, value: Any) -> Any:
        """Return the tensor without a reference to device memory, which the host may free earlier."""
        if not isinstance(value, torch.Tensor):
            return value
        if not self._reuses_memory or not self.holds(value):
            # `.data` has its own version counter: autograd must not see the execution as an in-place change.
            return value.data
        storage = self._storages[value.untyped_storage().data_ptr()]
        return _Place(storage, value.dtype, value.size(), value.stride(), value.storage_offset())

    def _overwrite_freed(self) -> None:
        for address, storage in self._storages.items() if self._reuses_memory else ():
            if address not in self._freed and torch._C._storage_Use_Count(storage._cdata) == 1:
                self._freed.add(address)
                memory = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
                self.compute.queue(partial(memory.fill_, 255))  # NaN in every type

    def _copy(self, target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        """Queue a copy between pinned memory and the device. A copy of pageable memory blocks the host."""
        copy = torch.ops.aten.copy_.default
        if not self.holds(source) and not (non_blocking and self._is_pinned(source)):
            source = source.clone()
        if self.holds(target) or (non_blocking and self._is_pinned(target)):
            self._queue(copy, (target, source), {})
            return target
        self._current.synchronize()
        return copy(target, source)

    # Simulated ranks: at least two with equal values, of which this process is one.

    def comm_of(self, group: Any) -> Stream:
        if group not in self._comms:
            self._comms[group] = self.Stream()
        return self._comms[group]

    def _collective(self, group: Any, run: Callable[[], Any]) -> CommHandle:
        comm = self.comm_of(group)
        comm.wait_stream(self._current)
        comm.queue(run)
        return CommHandle([_Work(comm.record_event())])  # type: ignore[list-item]

    def start_all_reduce(
        self, buffer: torch.Tensor, group: Any, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> CommHandle:
        if op == dist.ReduceOp.MAX:
            return self._start_maximum(buffer.data, group)
        return self._collective(group, lambda: buffer.data.mul_(group.size()))

    def _start_maximum(self, buffer: torch.Tensor, group: Any) -> CommHandle:
        """Start a maximum: the result equals the input, which is NaN while the message is in flight."""
        sent: list[torch.Tensor] = []

        def send() -> None:
            sent.append(buffer.clone())
            buffer.zero_()

        self._current.queue(send)
        return self._collective(group, lambda: buffer.copy_(sent[0]))

    def start_reduce_scatter(
        self, buffer: torch.Tensor, out: torch.Tensor, group: Any, reduce_dtype: None
    ) -> CommHandle:
        own = buffer[group.rank() * out.numel() :][: out.numel()]
        return self._collective(group, lambda: out.data.copy_(group.size() * own.data))

    def start_all_to_all(self, received: torch.Tensor, sent: torch.Tensor, group: Any) -> CommHandle:
        own = sent.chunk(group.size())[group.rank()]
        parts = received.data.chunk(group.size())
        return self._collective(group, lambda: [part.copy_(own.data) for part in parts])

    def start_all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, group: Any) -> CommHandle:
        parts = buffer.data.chunk(group.size())
        return self._collective(group, lambda: [part.copy_(shard.data) for part in parts])

    def start_swap(self, sent: torch.Tensor, received: torch.Tensor, group: Any, step: int) -> CommHandle:
        return self._collective(group, lambda: received.data.copy_(sent.data))


class _Place:
    """Position of a tensor in memory. It is not a tuple, because `tree_map` would descend into it."""

    def __init__(self, storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any) -> None:
        self.storage, self.dtype, self.place = storage, dtype, place


def _tensor_at(value: Any) -> Any:
    if not isinstance(value, _Place):
        return value
    size, stride, offset = value.place
    return torch.empty(0, dtype=value.dtype).set_(value.storage, offset, size, stride)  # type: ignore


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


_aten = torch.ops.aten
_FOR_THE_HOST = (
    _aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default,
    _aten.masked_select.default, _aten.nonzero.default,
)  # fmt: skip
"""Operations whose result, or its size, is a number that the host needs."""


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += _tensors(value)
    return found


class _Work:
    def __init__(self, end: Event) -> None:
        self._end = end

    def wait(self) -> None:
        self._end.wait()
