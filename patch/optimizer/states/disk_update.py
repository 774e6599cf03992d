"""Updates of chunks whose states are on a disk, by a separate worker, beside updates in host memory.

    read ahead into a buffer -> Adam kernel, in the buffer -> written behind

The order of updates is known. So while one chunk is updated, the states of the next chunks are read and those
of the previous chunk are written. A speculative update writes its states to a second place on the disk. A
commit exchanges the two places, like states and shadow in host memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from patch.memory.disk import DiskMemory, Jobs
from patch.memory.offload_device import HOST
from patch.optimizer.kernels.spec import AdamScalars
from patch.optimizer.states.chunk import Chunk, StateChunk
from patch.optimizer.states.host_buffers import HostedChunks, OutputBuffers, fit_pool
from patch.optimizer.states.host_update import HostUpdates, States, _ChunkUpdate

NUM_BUFFERS = 4
"""Chunks whose states have a buffer: one is updated, one written, two are read."""


class _Buffer:
    def __init__(self, states: dict[str, Chunk]) -> None:
        self.states = states
        self.jobs: Jobs = ()


class DiskUpdates(HostUpdates):
    """The updates of all chunks on the disk; see HostUpdates."""

    def __init__(self, chunks: HostedChunks, disk: DiskMemory) -> None:
        super().__init__(chunks, disk)
        self.disk = disk
        self._free: deque[_Buffer] = deque()
        self._reads: dict[StateChunk, _Buffer] = {}
        """Chunks that are read ahead; `_lock` guards it and `_free`."""
        self._order: Sequence[StateChunk] = ()
        """The order of the last step's updates after its backward."""
        self.disk_wait_s = 0.0
        """Seconds that the worker has waited for the disk."""

    def resize_buffers(self, chunks: Sequence[StateChunk]) -> None:
        """Allocate or drop buffers for these chunks on the disk; call it between two steps."""
        super().resize_buffers(chunks)
        self._drop_reads()
        self._order = ()
        fit_pool(self._free, min(len(chunks), NUM_BUFFERS), lambda: _Buffer(self._hosted.make_states(HOST)))

    def start_updates(self, chunks: Sequence[StateChunk], scalars: Sequence[AdamScalars]) -> None:
        """Update chunks in the background; see HostUpdates."""
        super().start_updates(chunks, scalars)
        self._order = chunks

    def cancel_step(self) -> None:
        """Cancel the current step; the updates of the last step continue."""
        is_begun = self._expected is not None
        super().cancel_step()
        if is_begun:
            self._drop_reads()

    def _drop_reads(self) -> None:
        with self._lock:
            self._free.extend(self._reads.values())
            self._reads.clear()

    def _prefetch_inputs(self) -> None:
        """Start copies of gradients, and reads of the states that are needed next; needs the lock."""
        super()._prefetch_inputs()
        wanted = self._chunks_to_read()
        first = dict.fromkeys(wanted[: len(self._free) + len(self._reads)])
        for chunk in self._reads.keys() - first:
            self._free.append(self._reads.pop(chunk))
        for chunk in first:
            if chunk not in self._reads and self._free:
                self._reads[chunk] = self._read(chunk)

    def _chunks_to_read(self) -> list[StateChunk]:
        """Return the chunks to read ahead, in update order, without chunks still to be changed."""
        if self._expected is None:
            return [update.chunk for update in self._queue]
        if self._jobs:  # of the last step
            return [each.chunk for each in self._queue if self._updates.get(each.chunk) is not each]
        early = [update.chunk for update in self._queue if update.chunk in self._speculations]
        return early + [chunk for chunk in self._order if chunk not in self._speculations]

    def _read(self, chunk: StateChunk) -> _Buffer:
        """Start to read a chunk's states; needs the lock and a free buffer."""
        buffer = self._free.popleft()
        buffer.jobs = [
            job
            for name, state in chunk.states.items()
            for job in self.disk.start_read(state.data, buffer.states[name].data, buffer.jobs)
        ]
        return buffer

    # The methods below run in the worker thread.

    @contextmanager
    def _inputs_of(self, update: _ChunkUpdate, outputs: OutputBuffers) -> Iterator[States]:
        with self._lock:
            if update.chunk not in self._reads and not self._free:
                self._free.append(self._reads.popitem()[1])
            taken = self._reads.pop(update.chunk, None) or self._read(update.chunk)
        with super()._inputs_of(update, outputs):
            try:
                begin = time.perf_counter()
                for job in taken.jobs:
                    job.result()
                self.disk_wait_s += time.perf_counter() - begin
                yield taken.states
                taken.jobs = [
                    job
                    for name, state in (outputs.shadow or update.chunk.states).items()
                    for job in self.disk.start_write(taken.states[name].data, state.data)
                ]
            finally:  # after an error the next user of the buffer fails too
                with self._lock:
                    self._free.append(taken)
