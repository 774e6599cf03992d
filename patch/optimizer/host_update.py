"""Updates of chunks on the host, beside the device's work.

    gradient final on the device -> copied to the host -> Adam kernel -> new weights copied back

One worker thread does all of it, and has a chunk's inputs brought while it updates the one before. While
backward still runs, chunks whose gradients are final are updated *speculatively*: with the scale that no
clipping gives, into a shadow of their states. When the norm says so, the shadow takes the place of the
states (an exchange of buffers), else it is forgotten and the chunk updated like any other; either way the
bits are those of the plain order.

Idea of a speculative step: SuperOffload (arXiv:2509.21271), there with a rollback that is not exact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch

from patch.distributed.flat import Pending
from patch.optimizer.accelerator import Accelerator, Mark
from patch.optimizer.chunk import HOST, Chunk, StateChunk
from patch.optimizer.kernels import AdamScalars, Segment, States, adam_kernel
from patch.optimizer.shard import Shard

# Of the chunks on the host, at most this share is updated speculatively: the bound of the shadows' memory.
_SHADOW_SHARE = 0.5
# It pauses while it failed in more than this share of recent steps; how fast older steps are forgotten.
_MAX_FAILURES, _MEMORY = 0.2, 0.9


def kernel_states(chunks: Mapping[str, Chunk], place: slice, weight: torch.Tensor) -> States:
    """What the update of some elements of a chunk reads or writes, `weight` being theirs."""
    moments = chunks["exp_avg"].data[place], chunks["exp_avg_sq"].data[place]
    for name in ("master", "master_low"):
        if name in chunks:
            return States(chunks[name].data[place], *moments, weight)
    return States(weight, *moments)


class _Inputs:
    """Pinned buffers of what an update reads from the device."""

    def __init__(self, size: int, like: Shard, accelerator: Accelerator) -> None:
        self.grad = accelerator.pinned(size, like.gradient.dtype)
        is_master = like.weight.dtype != torch.float16
        self.weight = accelerator.pinned(size, like.weight.dtype) if is_master else None
        """Weights that are masters (fp32), or their high bits (bf16)."""


class _Results:
    """What an update writes."""

    def __init__(self, size: int, like: Shard, accelerator: Accelerator) -> None:
        self.weight = accelerator.pinned(size, like.weight.dtype)
        self.shadow: dict[str, Chunk] = {}
        """The states, where they are not to be written over the old ones."""
        self.sent: Mark | None = None
        """The end of the copies that left `weight` last."""


class _Update:
    """One chunk's update in one step."""

    def __init__(self, chunk: StateChunk, scalars: AdamScalars) -> None:
        self.chunk, self.scalars = chunk, scalars
        self.is_wanted = True
        """Not yet known to be made with wrong scalars."""
        self.inputs: _Inputs | None = None
        self.arrived: Mark | None = None
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
        accelerator: the device that gradients come from and weights go to.
        shadow_bytes: the most that shadows may hold.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        dtypes: Mapping[str, torch.dtype],
        size: int,
        accelerator: Accelerator,
        shadow_bytes: int,
    ) -> None:
        self._shards, self._dtypes, self._size = shards, dtypes, size
        self._accelerator = accelerator
        written = [*dtypes.values(), shards[0].weight.dtype]
        self._max_shadows = shadow_bytes // (size * sum(dtype.itemsize for dtype in written))
        self._kernel = adam_kernel(torch.device("cpu"))
        self._worker = ThreadPoolExecutor(1, "host-adam", initializer=accelerator.enter)
        self._inputs: deque[_Inputs] = deque()
        """Those that no update under way has."""
        self._plain: deque[_Results] = deque()
        self._shadows: deque[_Results] = deque()
        """Those that no update of this step has."""
        self._queue: deque[_Update] = deque()
        """Updates that the worker has not begun, in the order of its jobs."""
        self._expected: AdamScalars | None = None
        self._speculated: dict[StateChunk, _Speculation] = {}
        self._written: dict[StateChunk, Future[Mark]] = {}
        self.failures = 0.0
        """Recent share of steps in which the expected scalars were wrong."""
        self.busy_s = self.waited_s = 0.0
        """How long the worker has updated, and how long others have waited for it."""

    def prepare(self, num_chunks: int) -> None:
        """Have buffers for `num_chunks` chunks on the host, and the shadows they want; between two steps."""
        arguments = self._size, self._shards[0], self._accelerator
        while len(self._plain) < min(2, num_chunks):
            self._inputs.append(_Inputs(*arguments))
            self._plain.append(_Results(*arguments))
        wanted = min(int(num_chunks * _SHADOW_SHARE), self._max_shadows)
        while len(self._shadows) > wanted:
            self._shadows.pop()
        while len(self._shadows) < wanted:
            results = _Results(*arguments)
            results.shadow = {name: Chunk(self._size, HOST, dtype) for name, dtype in self._dtypes.items()}
            self._shadows.append(results)

    def expect(self, scalars: AdamScalars) -> None:
        """Begin a step that will probably update with these scalars: no clipping."""
        self._expected = scalars

    def speculate(self, chunk: StateChunk, after: Pending | None) -> None:
        """Update a chunk whose gradients are final once `after` is done, into a shadow; returns at once.

        Nothing happens where no shadow is free, or where speculation failed too often of late.
        """
        if self.failures >= _MAX_FAILURES or not self._shadows:
            return
        assert self._expected is not None
        self._accelerator.follow(after)
        update, results = _Update(chunk, self._expected), self._shadows.popleft()
        self._queue.append(update)
        job = self._worker.submit(self._update_shadow, results)
        self._speculated[chunk] = _Speculation(update, results, job)

    def start(self, chunks: Sequence[StateChunk], scalars: AdamScalars) -> None:
        """Update chunks, in the order in which their weights are wanted; returns at once.

        The host knows that all gradients are final.
        """
        is_wrong = scalars != self._expected
        if self._expected is not None:
            self.failures = _MEMORY * self.failures + (1 - _MEMORY) * is_wrong
        speculated = {} if is_wrong else self._speculated
        for chunk in chunks:
            if chunk in speculated:
                self._written[chunk] = self._worker.submit(self._commit, speculated[chunk])
            else:
                self._queue.append(_Update(chunk, scalars))
                self._written[chunk] = self._worker.submit(self._update_in_place)
        self._end_speculation(is_wanted=not is_wrong)

    def cancel(self) -> None:
        """Forget what was speculated: the step is not taken."""
        self._end_speculation(is_wanted=False)

    def _end_speculation(self, *, is_wanted: bool) -> None:
        for update, results, _ in self._speculated.values():
            update.is_wanted = is_wanted
            # The worker comes to their next use after all that it has to do now.
            self._shadows.append(results)
        self._speculated, self._expected = {}, None

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

    # What follows runs in the worker.

    def _update_shadow(self, results: _Results) -> None:
        update = self._begin_next()
        try:
            if update.is_wanted:
                self._compute(update, results, results.shadow)
        finally:
            self._end(update)

    def _update_in_place(self) -> Mark:
        update = self._begin_next()
        self._plain.rotate(-1)
        try:
            self._compute(update, self._plain[0], update.chunk.states)
        finally:
            self._end(update)
        return self._send(update.chunk, self._plain[0])

    def _commit(self, speculation: _Speculation) -> Mark:
        update, results, job = speculation
        job.result()  # or what it met
        update.chunk.states, results.shadow = results.shadow, update.chunk.states
        return self._send(update.chunk, results)

    def _begin_next(self) -> _Update:
        """The next update, its inputs on their way, and those of the one after it."""
        update = self._queue.popleft()
        for coming in (update, self._queue[0] if self._queue else update):
            if coming.is_wanted and coming.inputs is None:
                self._bring(coming)
        return update

    def _bring(self, update: _Update) -> None:
        inputs = update.inputs = self._inputs.popleft()
        copies = []
        for s in update.chunk.segments:
            shard = self._shards[s.shard]
            copies.append((shard.gradient[s.begin : s.end], inputs.grad[s.place]))
            if inputs.weight is not None:
                copies.append((shard.weight[s.begin : s.end], inputs.weight[s.place]))
        update.arrived = self._accelerator.to_host(copies)

    def _end(self, update: _Update) -> None:
        if update.inputs is not None:
            self._inputs.append(update.inputs)

    def _compute(self, update: _Update, results: _Results, into: dict[str, Chunk]) -> None:
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
        self._kernel.update(segments, update.scalars)
        self.busy_s += time.perf_counter() - begin

    def _send(self, chunk: StateChunk, results: _Results) -> Mark:
        results.sent = self._accelerator.to_device(
            [(results.weight[s.place], self._shards[s.shard].weight[s.begin : s.end]) for s in chunk.segments]
        )
        return results.sent
