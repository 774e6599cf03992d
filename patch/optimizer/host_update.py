"""Updates of chunks on the host, beside the device's work.

    gradient final on the device -> copied to the host -> Adam kernel -> new weights copied back

Copies to the host are queued while backward runs, as soon as the host knows what they are to wait for: those
for which there are pinned buffers, the others when the one worker thread, which updates, gives buffers back.
While backward still runs, some of these chunks are updated *speculatively*: with the scale that no clipping
gives, into a shadow of their states. When the norm says so, the shadow takes the place of the states (an
exchange of buffers), else it is forgotten and the chunk updated like any other; either way the bits are those
of the plain order. What the worker has not begun by then is done in the order in which weights are needed.

Idea of a speculative step: SuperOffload (arXiv:2509.21271), there with a rollback that is not exact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from threading import Lock
from typing import NamedTuple, TypeVar

import torch

from patch.distributed.async_collectives import Pending
from patch.memory import HOST, Event, OffloadDevice
from patch.optimizer.chunk import Chunk, StateChunk
from patch.optimizer.kernels import AdamScalars, Segment, States, adam_kernel
from patch.optimizer.layout import BucketShard

# Of the chunks on the host, at most this share is updated speculatively.
_SHADOW_SHARE = 0.5
# Of the host memory that states leave, what shadows may take, and what pinned inputs may.
_SHADOW_BYTES, _INPUT_BYTES = 0.5, 0.25
# It pauses while it failed in more than this share of recent steps; how fast older steps are forgotten.
_MAX_FAILURES, _MEMORY = 0.2, 0.9
_Buffers = TypeVar("_Buffers")


def kernel_states(chunks: Mapping[str, Chunk], place: slice, weight: torch.Tensor) -> States:
    """What the update of some elements of a chunk reads or writes, `weight` being theirs."""
    moments = chunks["exp_avg"].data[place], chunks["exp_avg_sq"].data[place]
    for name in ("master", "master_low"):
        if name in chunks:
            return States(chunks[name].data[place], *moments, weight)
    return States(weight, *moments)


class _Inputs:
    """Pinned buffers of what an update reads from the device."""

    def __init__(self, size: int, like: BucketShard, device: OffloadDevice) -> None:
        self.grad = device.allocate_pinned(size, like.grad.dtype)
        is_master = like.param.dtype != torch.float16
        self.weight = device.allocate_pinned(size, like.param.dtype) if is_master else None
        """Weights that are masters (fp32), or their high bits (bf16)."""


class _Results:
    """What an update writes."""

    def __init__(self, size: int, like: BucketShard, device: OffloadDevice) -> None:
        self.weight = device.allocate_pinned(size, like.param.dtype)
        self.shadow: dict[str, Chunk] = {}
        """The states, where they are not to be written over the old ones."""
        self.sent: Event | None = None
        """The end of the copies that left `weight` last."""


class _Update:
    """One chunk's update in one step."""

    def __init__(self, chunk: StateChunk, final: Event) -> None:
        self.chunk, self.final = chunk, final
        """`final`: the point at which its gradients are."""
        self.inputs: _Inputs | None = None
        self.arrived: Event | None = None
        """The end of the copies to `inputs`."""


class _Speculation(NamedTuple):
    update: _Update
    results: _Results
    job: Future[None]


class HostUpdates:
    """The updates of all chunks on the host.

    Args:
        shards: where gradients and weights lie.
        dtypes: of the states that a chunk holds.
        size: elements of a chunk.
        device: the device that gradients come from and weights go to.
        spare_bytes: host memory of this process that states leave.
    """

    def __init__(
        self,
        shards: Sequence[BucketShard],
        dtypes: Mapping[str, torch.dtype],
        size: int,
        device: OffloadDevice,
        spare_bytes: int,
    ) -> None:
        self._shards, self._dtypes, self._size = shards, dtypes, size
        self._device = device
        gradient, weight = shards[0].grad.dtype, shards[0].param.dtype
        shadow_bytes = size * sum(dtype.itemsize for dtype in (*dtypes.values(), weight))
        self._max_shadows = int(_SHADOW_BYTES * spare_bytes) // shadow_bytes
        input_bytes = size * (gradient.itemsize + weight.itemsize)
        self._max_inputs = 2 + int(_INPUT_BYTES * spare_bytes) // input_bytes
        self._kernel = adam_kernel(torch.device("cpu"))
        self._worker = ThreadPoolExecutor(1, "host-adam", initializer=device.set_device)
        self._lock = Lock()
        """Of `_inputs` and `_order`."""
        self._inputs: deque[_Inputs] = deque()
        """Those that no update has."""
        self._order: deque[_Update] = deque()
        """Updates of this step that the worker has not begun, in the order in which it will, or may."""
        self._plain: deque[_Results] = deque()
        self._shadows: deque[_Results] = deque()
        """Those that no update of this step has."""
        self._expected: AdamScalars | None = None
        self._final: dict[StateChunk, _Update] = {}
        """Chunks whose gradients are known to be final in the step under way."""
        self._speculated: dict[StateChunk, _Speculation] = {}
        self._written: dict[StateChunk, Future[Event]] = {}
        self.failures = 0.0
        """Recent share of steps in which the expected scalars were wrong."""
        self.busy_s = self.waited_s = 0.0
        """How long the worker has updated, and how long others have waited for it."""

    def prepare(self, num_chunks: int) -> None:
        """Have buffers for `num_chunks` chunks on the host; between two steps."""
        arguments = self._size, self._shards[0], self._device
        while len(self._plain) < min(2, num_chunks):
            self._plain.append(_Results(*arguments))
        _resize(self._inputs, min(num_chunks, self._max_inputs), lambda: _Inputs(*arguments))
        wanted = min(int(num_chunks * _SHADOW_SHARE), self._max_shadows)
        _resize(self._shadows, wanted, self._make_shadow)

    def _make_shadow(self) -> _Results:
        results = _Results(self._size, self._shards[0], self._device)
        results.shadow = {name: Chunk(self._size, HOST, dtype) for name, dtype in self._dtypes.items()}
        return results

    def expect(self, scalars: AdamScalars) -> None:
        """Begin a step that will probably update with these scalars: no clipping."""
        self._expected = scalars

    def bring(self, chunk: StateChunk, after: Pending | None) -> None:
        """The gradients of a chunk are final once `after` is done: have them copied to the host then.

        It is updated into a shadow where one is free and speculation has not failed too often of late.
        Returns at once.
        """
        assert self._expected is not None
        update = self._final[chunk] = _Update(chunk, self._device.record_event(after))
        with self._lock:
            self._order.append(update)
            self._bring_what_fits()
        if self.failures < _MAX_FAILURES and self._shadows:
            results = self._shadows.popleft()
            job = self._worker.submit(self._update_shadow, update, results, self._expected)
            self._speculated[chunk] = _Speculation(update, results, job)

    def start(self, chunks: Sequence[StateChunk], scalars: AdamScalars) -> None:
        """Update chunks, in the order in which their weights are wanted; returns at once.

        The gradients of all of them are final where the compute stream is now, and the host knows that
        what was to read the old weights has done so.
        """
        assert not self._written, "weights of the step before are waited for first"
        is_wrong = scalars != self._expected
        if self._expected is not None:
            self.failures = _MEMORY * self.failures + (1 - _MEMORY) * is_wrong
        done = self._end_speculation(is_wrong)
        now = self._device.record_event()
        updates = {
            chunk: self._final.get(chunk) or _Update(chunk, now) for chunk in chunks if chunk not in done
        }
        with self._lock:
            self._order = deque(updates.values())
            self._bring_what_fits()
        for chunk in chunks:
            if chunk in done:
                self._written[chunk] = self._worker.submit(self._commit, done[chunk])
            else:
                self._written[chunk] = self._worker.submit(self._update_in_place, updates[chunk], scalars)
        self._final, self._expected = {}, None

    def cancel(self) -> None:
        """Forget what was brought and speculated, the step is not taken; nothing of it is under way after."""
        for speculation in self._end_speculation(is_wrong=False).values():
            speculation.job.exception()
        with self._lock:
            for update in set(self._order).intersection(self._final.values()):
                self._order.remove(update)
                self._give_back(update)
        self._final, self._expected = {}, None

    def _end_speculation(self, is_wrong: bool) -> dict[StateChunk, _Speculation]:
        """Drop what the worker has not begun, or all where the scalars were wrong; what is left."""
        left = {}
        for chunk, speculation in self._speculated.items():
            # The worker comes to its next use after all that it has to do now.
            self._shadows.append(speculation.results)
            if not speculation.job.cancel():
                if is_wrong:  # its inputs may be another update's by now
                    self._final[chunk] = _Update(chunk, speculation.update.final)
                else:
                    left[chunk] = speculation
        self._speculated = {}
        return left

    def arrive(self, chunk: StateChunk, *, block: bool) -> bool:
        """Let the current stream wait for a chunk's new weights.

        Returns:
            False where they are not written yet and not `block`.
        Raises:
            Exception: what the worker met.
        """
        job = self._written.get(chunk)
        if job is None:
            return True
        if not block and not job.done():
            return False
        begin = time.perf_counter()
        job.result().wait()
        self.waited_s += time.perf_counter() - begin
        del self._written[chunk]
        return True

    def _bring_what_fits(self) -> None:
        """Have as many updates' inputs copied as buffers are free; with the lock."""
        for update in self._order:
            if not self._inputs:
                break
            if update.inputs is None:
                self._bring(update)

    def _bring(self, update: _Update) -> None:
        """Have an update's inputs copied, with the lock; where no buffer is free, to that needed last."""
        if not self._inputs:
            self._give_back(next(other for other in reversed(self._order) if other.inputs is not None))
        inputs = update.inputs = self._inputs.popleft()
        copies = []
        for s in update.chunk.segments:
            shard = self._shards[s.shard]
            copies.append((shard.grad[s.begin : s.end], inputs.grad[s.place]))
            if inputs.weight is not None:
                copies.append((shard.param[s.begin : s.end], inputs.weight[s.place]))
        update.arrived = self._device.copy_to_host(copies, update.final)

    def _give_back(self, update: _Update) -> None:
        """Free an update's buffers, with the lock; copies under way to them end before those to come."""
        if update.inputs is not None:
            self._inputs.append(update.inputs)
            update.inputs = None

    # What follows runs in the worker.

    def _update_shadow(self, update: _Update, results: _Results, scalars: AdamScalars) -> None:
        with self._begun(update):
            self._compute(update, scalars, results, results.shadow)

    def _update_in_place(self, update: _Update, scalars: AdamScalars) -> Event:
        self._plain.rotate(-1)
        with self._begun(update):
            self._compute(update, scalars, self._plain[0], update.chunk.states)
        return self._send(update.chunk, self._plain[0])

    def _commit(self, speculation: _Speculation) -> Event:
        update, results, job = speculation
        job.result()  # or what it met
        update.chunk.states, results.shadow = results.shadow, update.chunk.states
        return self._send(update.chunk, results)

    @contextmanager
    def _begun(self, update: _Update) -> Iterator[None]:
        """Inside, an update's inputs are there or on their way, and so are those of the next one."""
        with self._lock:
            if update in self._order:  # `start` leaves out what has just begun
                self._order.remove(update)
            for coming in (update, *islice(self._order, 1)):
                if coming.inputs is None:
                    self._bring(coming)
        try:
            yield
        finally:
            with self._lock:
                self._give_back(update)
                self._bring_what_fits()

    def _compute(
        self, update: _Update, scalars: AdamScalars, results: _Results, into: dict[str, Chunk]
    ) -> None:
        assert update.inputs is not None and update.arrived is not None
        update.arrived.synchronize()
        if results.sent is not None:
            results.sent.synchronize()
        begin = time.perf_counter()
        grad, new = update.inputs.grad, results.weight
        old = new if update.inputs.weight is None else update.inputs.weight
        segments = [
            Segment(
                grad[s.place],
                kernel_states(update.chunk.states, s.place, old[s.place]),
                s.is_decayed,
                kernel_states(into, s.place, new[s.place]),
            )
            for s in update.chunk.segments
        ]
        self._kernel.update(segments, scalars)
        self.busy_s += time.perf_counter() - begin

    def _send(self, chunk: StateChunk, results: _Results) -> Event:
        results.sent = self._device.copy_to_device(
            [(results.weight[s.place], self._shards[s.shard].param[s.begin : s.end]) for s in chunk.segments]
        )
        return results.sent


def _resize(pool: deque[_Buffers], number: int, make: Callable[[], _Buffers]) -> None:
    while len(pool) > number:
        pool.pop()
    while len(pool) < number:
        pool.append(make())
