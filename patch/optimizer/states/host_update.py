"""Updates of chunks on the host, in parallel with the device's work.

    gradient final on the device -> copied to the host -> Adam kernel -> new parameters copied back

Copies to the host start during backward, as soon as a chunk's gradients are known to be final. The first
chunks use the free pinned input buffers; the others follow when the worker thread, which runs the kernel,
releases buffers. During backward some of these chunks are updated *speculatively*: with the gradient scale
for no clipping, and into a shadow, a second set of their states. If the gradient norm confirms that scale,
shadow and states are exchanged. Otherwise the shadow is ignored, and the chunk is updated again from the
unchanged states. Both ways give the same bits as an update after backward. Chunks that the worker has not
begun when the norm is known are updated in the order in which their parameters are needed.

The host keeps the weights of its chunks from step to step. The device's weights are copied to the host only
before the first step after `forget_weights` or after a chunk came to the host.

Source: the idea of a speculative step is SuperOffload's (arXiv:2509.21271), whose rollback is not exact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, islice
from threading import Lock
from typing import NamedTuple

import torch

from patch.compat.torch_internals import region
from patch.memory.offload_device import HOST, Allocator, Event, Joinable
from patch.optimizer.kernels import adam_kernel
from patch.optimizer.kernels.low_bit_moments import elements_of
from patch.optimizer.kernels.spec import AdamScalars, AdamStates, UpdateItem
from patch.optimizer.states.chunk import BucketShard, Chunk, ChunkRange, StateChunk
from patch.optimizer.states.host_buffers import HostBuffers, HostedChunks, InputBuffers, OutputBuffers
from patch.optimizer.states.placement import LateUpdates

# Speculation pauses while it has failed in more than this share of recent steps.
_MAX_FAILURE_RATE = 0.2
# The failure rate is an exponential moving average; this is the weight of the past in each step.
_FAILURE_RATE_DECAY = 0.9


States = Mapping[str, Chunk]


def adam_states(states: States, in_chunk: slice, param: torch.Tensor) -> AdamStates:
    """Return the states of some elements of a chunk, counted in it, as the Adam kernel takes them.

    `param` (n,) are the parameters of these elements.
    """

    def part(name: str) -> torch.Tensor | None:
        each = elements_of(name)
        return states[name].data[in_chunk.start // each : in_chunk.stop // each] if name in states else None

    moments = part("exp_avg"), part("exp_avg_sq")
    scales = part("exp_avg_scale"), part("exp_avg_sq_scale")
    for name in ("master", "master_low"):
        if name in states:
            return AdamStates(states[name].data[in_chunk], *moments, param, *scales)
    return AdamStates(param, *moments, None, *scales)


def item_of(
    states: States, r: ChunkRange, shard: BucketShard, scalars: Sequence[AdamScalars]
) -> UpdateItem:
    """Return the update on the device of a range of a chunk with these states."""
    own = adam_states(states, r.in_chunk, shard.param[r.in_shard])
    return UpdateItem(shard.grad[r.in_shard], own, scalars[r.group], None, r.draw)


class _ChunkUpdate:
    """The update of one chunk in one step, whose gradients are final at `grads_final`."""

    def __init__(self, chunk: StateChunk, grads_final: Event) -> None:
        self.chunk = chunk
        self.grads_final = grads_final
        self.inputs: InputBuffers | None = None
        """The buffers with the update's inputs, from the start of the copies to the end of the update."""
        self.inputs_copied: Event | None = None


class _Speculation(NamedTuple):
    update: _ChunkUpdate
    outputs: OutputBuffers
    job: Future[None]


class HostUpdates:
    """The updates of all chunks on the host.

    Args:
        memory: memory of the states of speculative updates.
    """

    def __init__(self, chunks: HostedChunks, memory: Allocator = HOST) -> None:
        self._hosted, self._shards, self._device = chunks, chunks.shards, chunks.device
        self._buffers = HostBuffers(chunks, memory)
        self._kernel = adam_kernel(torch.device("cpu"))
        self._worker = ThreadPoolExecutor(1, "host-adam", initializer=chunks.device.set_device)
        self._lock = Lock()
        """Guards `_buffers.inputs` and `_queue`."""
        self._queue: deque[_ChunkUpdate] = deque()
        """Updates that the worker has not begun, in order; during backward only some are submitted to it."""
        self._expected: Sequence[AdamScalars] | None = None
        """The scalars of the current step's update without clipping, or None outside of a step."""
        self._updates: dict[StateChunk, _ChunkUpdate] = {}
        """The updates of the current step's chunks whose gradients are known to be final."""
        self._speculations: dict[StateChunk, _Speculation] = {}
        self._jobs: dict[StateChunk, Future[Event]] = {}
        """Updates of the last step that were not waited for; each returns the end of the copies back."""
        self.failure_rate = 0.0
        """Recent share of steps in which the expected scalars were wrong."""
        self.late = LateUpdates()
        """The updates after the norm in the last complete step."""
        self._late, self._norm_known = LateUpdates(), 0.0

    def resize_buffers(self, chunks: Sequence[StateChunk]) -> None:
        """Allocate or drop buffers for these chunks on the host; call it between two steps."""
        self._buffers.resize(chunks)

    def forget_weights(self) -> None:
        """Read all weights from the device in the next step, because they may be written there before."""
        for kept in self._buffers.kept.values():
            kept.is_current = False

    def start_step(self, expected: Sequence[AdamScalars]) -> None:
        """Begin a step before its backward, with the scalars of each parameter group for no clipping."""
        self._expected = expected

    def grads_ready(self, chunk: StateChunk, after: Sequence[Joinable]) -> None:
        """Start to copy a chunk's gradients to the host, without blocking.

        A speculative update follows if a shadow is free and speculation has not failed too often. The
        gradients are final after the reductions `after`, or without any after the current stream's work.
        """
        assert self._expected is not None
        update = self._updates[chunk] = _ChunkUpdate(chunk, self._device.record_event(after))
        with self._lock:
            self._queue.append(update)
            self._prefetch_inputs()
        if self.failure_rate < _MAX_FAILURE_RATE and self._buffers.shadow_outputs:
            outputs = self._buffers.shadow_outputs.popleft()
            job = self._worker.submit(self._update_speculatively, update, outputs, self._expected)
            self._speculations[chunk] = _Speculation(update, outputs, job)

    def start_updates(self, chunks: Sequence[StateChunk], scalars: Sequence[AdamScalars]) -> None:
        """Update all chunks on the host in the background, in the order in which their parameters are needed.

        At the end of the current stream, all gradients must be final and old parameters no longer read.
        """
        assert not self._jobs, "updates of the last step were not waited for"
        self.late, self._late, self._norm_known = self._late, LateUpdates(), time.perf_counter()
        is_wrong = scalars != self._expected
        if self._expected is not None:
            self.failure_rate = _FAILURE_RATE_DECAY * self.failure_rate + (1 - _FAILURE_RATE_DECAY) * is_wrong
        speculated = self._end_speculation(is_wrong)
        self._expected = None
        now = self._device.record_event()
        updates = {
            chunk: self._updates.get(chunk) or _ChunkUpdate(chunk, now)
            for chunk in chunks
            if chunk not in speculated
        }
        with self._lock:
            self._queue = deque(updates.values())
            self._prefetch_inputs()
        outputs_in_turn = cycle(self._buffers.outputs)
        for chunk in chunks:
            if chunk in speculated:
                self._jobs[chunk] = self._worker.submit(self._commit, speculated[chunk])
                continue
            outputs = self._buffers.kept.get(chunk) or next(outputs_in_turn)
            self._jobs[chunk] = self._worker.submit(self._update_in_place, updates[chunk], outputs, scalars)
        self._updates = {}

    def cancel_step(self) -> None:
        """Cancel the current step: wait for its speculative updates and ignore their results."""
        for speculation in self._end_speculation(is_wrong=False).values():
            speculation.job.exception()
        with self._lock:
            for update in set(self._queue).intersection(self._updates.values()):
                self._queue.remove(update)
                self._release_inputs(update)
        self._updates, self._expected = {}, None

    def _end_speculation(self, is_wrong: bool) -> dict[StateChunk, _Speculation]:
        """Cancel speculative updates that have not begun; return the others if their scalars are right."""
        good = {}
        for chunk, speculation in self._speculations.items():
            # Free at once: the next job with these outputs runs after all current jobs of the worker.
            self._buffers.shadow_outputs.append(speculation.outputs)
            if not speculation.job.cancel():
                if is_wrong:  # with new inputs: another update may use the old buffers now
                    self._updates[chunk] = _ChunkUpdate(chunk, speculation.update.grads_final)
                else:
                    good[chunk] = speculation
        self._speculations = {}
        return good

    def wait_for_update(self, chunk: StateChunk, *, block: bool) -> bool:
        """Make the current stream wait for a chunk's new parameters, if it is being updated.

        Returns:
            False if the worker has not updated the chunk yet and `block` is False.
        Raises:
            Exception: the error that the worker raised.
        """
        job = self._jobs.get(chunk)
        if job is None:
            return True
        if not block and not job.done():
            return False
        with region("wait for chunk %d", chunk.index):
            job.result().wait()
        del self._jobs[chunk]
        return True

    def _prefetch_inputs(self) -> None:
        """Start copies for queued updates while input buffers are free; needs the lock."""
        for update in self._queue:
            if not self._buffers.inputs:
                break
            if update.inputs is None:
                self._copy_inputs(update)

    def _copy_inputs(self, update: _ChunkUpdate) -> None:
        """Start to copy an update's inputs, perhaps to buffers of the last queued update; needs the lock."""
        if not self._buffers.inputs:
            self._release_inputs(next(other for other in reversed(self._queue) if other.inputs is not None))
        inputs = update.inputs = self._buffers.inputs.popleft()
        weights, copies = self._buffers.weights_of(update.chunk, inputs), []
        for r in update.chunk.ranges:
            shard = self._shards[r.shard]
            if shard.is_on_host:
                continue
            copies.append((shard.grad[r.in_shard], inputs.grad[r.in_chunk]))
            if weights.param is not None and not weights.is_current:
                copies.append((shard.param[r.in_shard], weights.param[r.in_chunk]))
        with region("chunk %d to host", update.chunk.index):
            update.inputs_copied = self._device.copy_to_host(copies, update.grads_final)
        weights.is_current = weights is not inputs

    def _release_inputs(self, update: _ChunkUpdate) -> None:
        """Free an update's input buffers; needs the lock. Copies to them end before any later copy begins."""
        if update.inputs is not None:
            self._buffers.inputs.append(update.inputs)
            update.inputs = None

    # The methods below run in the worker thread.

    def _update_speculatively(
        self, update: _ChunkUpdate, outputs: OutputBuffers, scalars: Sequence[AdamScalars]
    ) -> None:
        with self._inputs_of(update, outputs) as buffer:
            self._compute(update, scalars, outputs, buffer)

    def _commit(self, speculation: _Speculation) -> Event:
        update, outputs, job = speculation
        job.result()  # raises the error of the update
        update.chunk.states, outputs.shadow = outputs.shadow, update.chunk.states
        if (kept := self._buffers.kept.get(update.chunk)) is not None:
            kept.param, outputs.param, outputs.copied = outputs.param, kept.param, kept.copied
        return self._copy_params_back(update.chunk, kept or outputs, update.chunk.ranges)

    def _update_in_place(
        self, update: _ChunkUpdate, outputs: OutputBuffers, scalars: Sequence[AdamScalars]
    ) -> Event:
        with self._inputs_of(update, outputs) as buffer:
            self._compute(update, scalars, outputs, buffer)
        late_s = time.perf_counter() - self._norm_known
        self._late = LateUpdates(late_s, self._late.numel + update.chunk.numel)
        on_device = [r for r in update.chunk.ranges if not self._shards[r.shard].is_on_host]
        return self._copy_params_back(update.chunk, outputs, on_device)

    @contextmanager
    def _inputs_of(self, update: _ChunkUpdate, outputs: OutputBuffers) -> Iterator[States | None]:
        """Return a context in which the copies of this update's and the next update's inputs have started.

        Returns:
            a buffer with the states, updated in place and then stored in `outputs` or the chunk; None: the
            states are in memory.
        """
        with self._lock:
            if update in self._queue:  # it is not if `start_updates` has made a new queue meanwhile
                self._queue.remove(update)
            for next_update in (update, *islice(self._queue, 1)):
                if next_update.inputs is None:
                    self._copy_inputs(next_update)
        try:
            yield None
        finally:
            with self._lock:
                self._release_inputs(update)
                self._prefetch_inputs()

    def _compute(
        self,
        update: _ChunkUpdate,
        scalars: Sequence[AdamScalars],
        outputs: OutputBuffers,
        buffer: States | None,
    ) -> None:
        assert update.inputs is not None and update.inputs_copied is not None
        update.inputs_copied.synchronize()
        if outputs.copied is not None:
            outputs.copied.synchronize()
        inputs, items = update.inputs, []
        param = self._buffers.weights_of(update.chunk, inputs).param
        states = buffer or update.chunk.states
        new_states = buffer or outputs.shadow or states
        for r in update.chunk.ranges:
            shard, grad, new = self._shards[r.shard], inputs.grad[r.in_chunk], outputs.param[r.in_chunk]
            old = new if param is None else param[r.in_chunk]
            if shard.is_on_host:
                grad, old = shard.grad[r.in_shard], shard.param[r.in_shard]
                new = new if outputs.shadow else old  # a speculative update may prove wrong
            before, after = (
                adam_states(each, r.in_chunk, param) for each, param in ((states, old), (new_states, new))
            )
            items.append(UpdateItem(grad, before, scalars[r.group], after, r.draw))
        with region("chunk %d update", update.chunk.index):
            self._kernel.update(items)

    def _copy_params_back(
        self, chunk: StateChunk, outputs: OutputBuffers, ranges: Sequence[ChunkRange]
    ) -> Event:
        copies = [(outputs.param[r.in_chunk], self._shards[r.shard].param[r.in_shard]) for r in ranges]
        with region("chunk %d to device", chunk.index):
            outputs.copied = self._device.copy_to_device(copies)
        return outputs.copied
