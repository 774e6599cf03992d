"""Updates on the device of chunks whose states are in pinned host memory.

    states copied to a buffer on the device -> Adam kernel, in the buffer -> states copied back

It begins when the gradient norm is known, in the order in which parameters are needed, on streams of its own.
So the bus carries one chunk in each direction while a third one is updated, beside the next forward and
beside updates on the host. Gradients and parameters stay on the device. Kernels on device and host have equal
bits, so the streamed share changes none.
"""

from __future__ import annotations

from collections.abc import Sequence

from patch.compat.torch_internals import region
from patch.layout.buckets import NUM_STREAMED
from patch.memory.offload_device import Event, Joinable
from patch.optimizer.kernels.spec import AdamKernel, AdamScalars
from patch.optimizer.states.chunk import Chunk, StateChunk
from patch.optimizer.states.host_buffers import HostedChunks
from patch.optimizer.states.host_update import item_of
from patch.optimizer.states.placement import LateUpdates


class _Buffer:
    def __init__(self) -> None:
        self.states: dict[str, Chunk] = {}
        self.copied_back: Event | None = None


class StreamedUpdates:
    """The streamed updates of a rank; see HostUpdates for methods of the same names.

    Args:
        kernel: the device's kernel.
    """

    def __init__(self, chunks: HostedChunks, kernel: AdamKernel) -> None:
        self._hosted, self._device, self._kernel = chunks, chunks.device, kernel
        self._buffers: list[_Buffer] = []
        self._updated: dict[StateChunk, Event] = {}
        """The end of each chunk's update in the last step."""
        self._last: Event | None = None
        """The end of all copies back that have begun."""
        self.late = LateUpdates()
        """The updates of the last complete step."""
        self._norm_known: Event | None = None

    def resize_buffers(self, chunks: Sequence[StateChunk]) -> None:
        """Allocate or free buffers for these streamed chunks; call it between two steps.

        Raises:
            OutOfMemoryError: the device has no room for them.
        """
        while len(self._buffers) > min(len(chunks), NUM_STREAMED):
            buffer = self._buffers.pop()
            if buffer.copied_back is not None:  # else compute might reuse memory that is still being read
                buffer.copied_back.synchronize()
            for chunk in buffer.states.values():
                chunk.memory.free(chunk.data)
        while len(self._buffers) < min(len(chunks), NUM_STREAMED):
            self._buffers.append(_Buffer())  # at once, so that memory may run out below
            self._hosted.make_states(self._device, self._buffers[-1].states)

    def start_step(self, expected: Sequence[AdamScalars]) -> None:
        """Do nothing: updates begin with `start_updates`."""

    def grads_ready(self, chunk: StateChunk, after: Sequence[Joinable]) -> None:
        """Do nothing: gradients stay where they are."""

    def cancel_step(self) -> None:
        """Do nothing: before `start_updates` nothing has begun."""

    def start_updates(self, chunks: Sequence[StateChunk], scalars: Sequence[AdamScalars]) -> None:
        """Queue the updates of all streamed chunks, in the order in which their parameters are needed."""
        self.late = LateUpdates()
        if self._norm_known and self._last and self._updated:
            self._last.synchronize()  # a whole forward and backward ago, so it has ended
            seconds = self._norm_known.elapsed_time(self._last) / 1e3
            self.late = LateUpdates(seconds, sum(chunk.numel for chunk in self._updated))
        self._updated = {}
        final = self._norm_known = self._device.record_event()
        for number, chunk in enumerate(chunks):
            buffer = self._buffers[number % len(self._buffers)]
            self._update(chunk, buffer, scalars, final)

    def _update(
        self, chunk: StateChunk, buffer: _Buffer, scalars: Sequence[AdamScalars], final: Event
    ) -> None:
        own = {name: each for name, each in buffer.states.items() if name in chunk.states}
        there = [(chunk.states[n].data, each.data[: chunk.states[n].size]) for n, each in own.items()]
        # Copies back run in order, so the last use of the buffer is behind the chunk's own last copy back.
        arrived = self._device.copy_to_device(there, buffer.copied_back or self._last)
        items = [item_of(own, r, self._hosted.shards[r.shard], scalars) for r in chunk.ranges]

        def update() -> None:
            with region("streamed update of chunk %d", chunk.index):
                self._kernel.update(items)

        self._updated[chunk] = updated = self._device.run_aside(update, [final, arrived])
        back = [(on_device, on_host) for on_host, on_device in there]
        self._last = buffer.copied_back = self._device.copy_to_host(back, updated)
        chunk.wait_for_copies = self._last.synchronize

    def wait_for_update(self, chunk: StateChunk, *, block: bool) -> bool:
        """Make the current stream wait for a chunk's new parameters, if it is being updated; return True."""
        if chunk in self._updated:
            self._updated[chunk].wait()
        return True
