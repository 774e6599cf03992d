"""Updates of chunks on the host, beside the device's work.

    gradient final on the device -> copied to the host -> Adam kernel -> new weights copied back

One worker thread does all of it. While backward still runs, chunks whose gradients are final are updated
*speculatively*: with the scale that no clipping gives, into a shadow of their states. When the norm says
so, a shadow takes the place of the states (an exchange of buffers), else it is thrown away and the update
done again from the untouched states; either way the bits are those of the plain order.

Idea of a speculative step: SuperOffload (arXiv:2509.21271), there with a rollback that is not exact.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

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


class _Slot:
    """Pinned buffers of one chunk under way."""

    def __init__(self, size: int, like: Shard, accelerator: Accelerator) -> None:
        self.grad = accelerator.pinned(size, like.gradient.dtype)
        self.weight = accelerator.pinned(size, like.weight.dtype)
        """The new weights, on their way to the device."""
        is_master = like.weight.dtype != torch.float16
        self.old = accelerator.pinned(size, like.weight.dtype) if is_master else None
        """Weights that are masters (fp32), or their high bits (bf16), as they came from the device."""
        self.shadow: dict[str, Chunk] = {}
        self.user: Future | None = None
        """The last job that was given the slot."""
        self.mark: Mark | None = None
        """The end of the copies that left it last."""


class _Update:
    """One chunk's update in one step."""

    def __init__(self, chunk: StateChunk, slot: _Slot, arrived: Mark) -> None:
        self.chunk, self.slot, self.arrived = chunk, slot, arrived
        self.is_wanted = True
        """Not yet known to be made with a wrong scale."""


class HostUpdates:
    """The updates of all chunks on the host.

    Args:
        shards: where gradients and weights lie.
        dtypes: of the states that a chunk holds.
        size: elements of a chunk.
    """

    def __init__(
        self, shards: Sequence[Shard], dtypes: Mapping[str, torch.dtype], size: int, accelerator: Accelerator
    ) -> None:
        self._shards, self._dtypes, self._size = shards, dtypes, size
        self._accelerator = accelerator
        self._kernel = adam_kernel(torch.device("cpu"))
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="host-adam", initializer=self._enter)
        self._plain: deque[_Slot] = deque()
        self._shadows: deque[_Slot] = deque()
        self._expected: AdamScalars | None = None
        self._speculated: dict[StateChunk, _Update] = {}
        self._prefetched: _Update | None = None
        self._written: dict[StateChunk, Future[Mark]] = {}
        self.failures = 0.0
        """Recent share of steps in which the expected scalars were wrong."""
        self.busy_s = self.waited_s = 0.0
        """How long the worker has updated, and how long others have waited for it."""

    def prepare(self, num_chunks: int) -> None:
        """Make buffers and shadows for `num_chunks` chunks on the host; what is there is kept."""
        while len(self._plain) < min(2, num_chunks):
            self._plain.append(self._make_slot())
        while len(self._shadows) < int(num_chunks * _SHADOW_SHARE):
            slot = self._make_slot()
            slot.shadow = {name: Chunk(self._size, HOST, dtype) for name, dtype in self._dtypes.items()}
            self._shadows.append(slot)

    def expect(self, scalars: AdamScalars) -> None:
        """Begin a step that will probably update with these scalars: no clipping."""
        self._expected = scalars

    def speculate(self, chunk: StateChunk, after: Pending | None) -> None:
        """Update a chunk whose gradients are final once `after` is done, into a shadow; returns at once.

        Nothing happens where no shadow is free, or where speculation failed too often of late.
        """
        if self.failures >= _MAX_FAILURES or len(self._speculated) == len(self._shadows):
            return
        assert self._expected is not None
        slot = self._shadows[0]
        self._shadows.rotate(-1)
        if slot.user is not None:
            slot.user.result()
        update = self._fetch(chunk, slot, after)
        self._speculated[chunk] = update
        slot.user = self._worker.submit(self._compute, update, self._expected, slot.shadow)

    def start(self, chunks: Sequence[StateChunk], scalars: AdamScalars) -> None:
        """Update chunks, in the order in which their weights are wanted; returns at once.

        All gradients are final.
        """
        is_wrong = scalars != self._expected
        if self._expected is not None:
            self.failures = _MEMORY * self.failures + (1 - _MEMORY) * is_wrong
        plain = [chunk for chunk in chunks if chunk not in self._speculated]
        following = dict(zip(plain, plain[1:], strict=False))
        for chunk in chunks:
            update = self._speculated.get(chunk)
            if update is None:
                job = self._worker.submit(self._do, chunk, following.get(chunk), scalars)
            elif is_wrong:
                update.is_wanted = False
                job = self._worker.submit(self._redo, update, scalars)
            else:
                job = self._worker.submit(self._commit, update)
            self._written[chunk] = job
            if update is not None:
                update.slot.user = job
        self._speculated, self._expected = {}, None

    def cancel(self) -> None:
        """Forget what was speculated: the step is not taken."""
        for update in self._speculated.values():
            update.is_wanted = False
        self._speculated, self._expected = {}, None

    def arrive(self, chunk: StateChunk, *, block: bool) -> bool:
        """Let the compute stream wait for a chunk's new weights.

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

    def _enter(self) -> None:
        device = self._shards[0].weight.device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def _make_slot(self) -> _Slot:
        return _Slot(self._size, self._shards[0], self._accelerator)

    def _fetch(
        self, chunk: StateChunk, slot: _Slot, after: Pending | None = None, *, is_final: bool = False
    ) -> _Update:
        """Bring gradients, and weights that are masters, to the host; see `Accelerator.to_host`."""
        copies = []
        for s in chunk.segments:
            shard = self._shards[s.shard]
            copies.append((shard.gradient[s.begin : s.end], slot.grad[s.place]))
            if slot.old is not None:
                copies.append((shard.weight[s.begin : s.end], slot.old[s.place]))
        return _Update(chunk, slot, self._accelerator.to_host(copies, after, is_final=is_final))

    # What follows runs in the worker.

    def _compute(self, update: _Update, scalars: AdamScalars, into: dict[str, Chunk]) -> None:
        if update.is_wanted:
            update.arrived.synchronize()
            begin = time.perf_counter()
            new = update.slot.weight
            old = new if update.slot.old is None else update.slot.old
            segments = [
                Segment(
                    update.slot.grad[s.place],
                    kernel_states(update.chunk.states, s.place, old[s.place]),
                    s.is_decayed,
                    kernel_states(into, s.place, new[s.place]),
                )
                for s in update.chunk.segments
            ]
            self._kernel.update(segments, scalars)
            self.busy_s += time.perf_counter() - begin

    def _commit(self, update: _Update) -> Mark:
        update.chunk.states, update.slot.shadow = update.slot.shadow, update.chunk.states
        return self._send(update)

    def _redo(self, update: _Update, scalars: AdamScalars) -> Mark:
        update.is_wanted = True
        self._compute(update, scalars, update.chunk.states)
        return self._send(update)

    def _do(self, chunk: StateChunk, following: StateChunk | None, scalars: AdamScalars) -> Mark:
        update = self._prefetched or self._fetch_plain(chunk)
        self._prefetched = self._fetch_plain(following) if following is not None else None
        self._compute(update, scalars, chunk.states)
        return self._send(update)

    def _fetch_plain(self, chunk: StateChunk) -> _Update:
        slot = self._plain[0]
        self._plain.rotate(-1)
        if slot.mark is not None:
            slot.mark.synchronize()
        return self._fetch(chunk, slot, is_final=True)  # the norm of these gradients has been read

    def _send(self, update: _Update) -> Mark:
        weight = update.slot.weight
        update.slot.mark = self._accelerator.to_device(
            [(weight[s.place], self._shards[s.shard].weight[s.begin : s.end]) for s in update.chunk.segments]
        )
        return update.slot.mark
