"""Asynchronous collectives on slices of flat buffers, the same calls over NCCL and gloo.

Each `start_*` returns at once. `CommHandle.wait` makes this rank's compute stream (CUDA) or this thread (CPU)
wait for the result, and measures how long compute waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import torch
import torch.distributed as dist

from patch.compat.torch_internals import region
from patch.device import stream_of, streams_of
from patch.layout.buckets import NUM_BF16_SENDS_IN_FLIGHT

# torch 2.13 renamed the collectives on one tensor, and warns of the old names, which 2.11 still needs.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SMALL_VALUES = "small values"
"""The stream on which the host reads small reduced values."""


class WaitClock:
    """Accumulates the time that compute waits for communication."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which compute only waits; its duration is accumulated."""
        begin = self._mark()
        with region("wait"):
            yield
        self._marks.append((begin, self._mark()))

    def read_ms(self) -> float:
        """Return the milliseconds waited since the last call; on CUDA the host waits for the last mark."""
        marks, self._marks = self._marks, []
        if not self._is_cuda:
            return sum(end - begin for begin, end in marks) * 1e3
        if marks:
            marks[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in marks)

    def _mark(self) -> torch.cuda.Event | float:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class CommHandle:
    """A collective in flight.

    The class keeps a reference to it until `wait`, even if the caller drops the handle: gloo needs the memory
    of a message until the message has arrived.

    Args:
        works: torch's handle of each part of the collective.
        finish: called by `wait` after all parts have ended.
    """

    _then: Callable[[], CommHandle] | None = None
    """Starts another collective with the result of this collective."""

    _unfinished: ClassVar[set[CommHandle]] = set()

    def __init__(
        self, works: Sequence[dist.Work | torch.cuda.Event], finish: Callable[[], None] | None = None
    ) -> None:
        self._works, self._finish = works, finish
        if self._works:
            self._unfinished.add(self)

    def wait_stream(self) -> None:
        """Make the current CUDA stream (on a CPU: this thread) wait for the collective."""
        for work in self._works:
            work.wait()

    def wait(self, clock: WaitClock | None = None) -> None:
        """Make compute wait for the result, and accumulate the time in `clock`."""
        with nullcontext() if clock is None else clock.waiting():
            self.wait_stream()
        self._unfinished.discard(self)
        if self._finish is not None:
            self._finish()
        if self._then is not None:
            self._then().wait(clock)

    def chain(
        self, start: Callable[[], CommHandle], group: dist.ProcessGroup, device: torch.device
    ) -> CommHandle:
        """Chain a collective `start` that needs the result of this one; wait only for the returned handle.

        Over NCCL, the second collective follows on the device, while compute continues. Over gloo, `wait`
        starts it, because only `wait` learns that the first has ended.
        """
        if not follows_on_device(group):
            self._then = start
            return self
        streams, aside = streams_of(device), stream_of(device, "collectives that follow others")
        aside.wait_stream(streams.current_stream(device))
        with streams.stream(aside):
            self.wait()
            return start()


def queued_on(stream: torch.cuda.Stream) -> CommHandle:
    """Return the work queued on a stream so far, as a handle to wait for."""
    end = stream.record_event()  # None on a CPU
    return CommHandle([] if end is None else [end])


def follows_on_device(group: dist.ProcessGroup) -> bool:
    """Return whether the device (NCCL), not the host (gloo), waits for the group's messages."""
    return dist.get_backend(group) == "nccl"


def start_all_reduce(
    buffer: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> CommHandle:
    """Start an in-place all-reduce of `buffer`."""
    if group.size() == 1:
        return CommHandle([])
    return CommHandle([dist.all_reduce(buffer, op, group=group, async_op=True)])


def read_values(reduced: torch.Tensor, pending: CommHandle, clock: WaitClock) -> list[float]:
    """Return the values of a small reduction in flight: `reduced` as passed to `start_all_reduce`.

    The values are read on a separate stream, so the host does not wait for the work queued on the compute
    stream. `clock` accumulates the time that this thread waits for the other ranks.
    """
    streams = streams_of(reduced.device)
    with streams.stream(stream_of(reduced.device, SMALL_VALUES)):
        pending.wait(clock)
        return reduced.flatten().tolist()


def start_reduce_scatter(
    buffer: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    reduce_dtype: torch.dtype | None = None,
) -> CommHandle:
    """Start a reduce-scatter: write this rank's shard of the sum of `buffer` over the group to `out`.

    Over gloo the ranks exchange their parts and sum them in rank order, because gloo's own reduce-scatter
    sends as many bytes as its all-reduce.

    Args:
        buffer: (group size * n,); not changed, unless `out` is a part of it.
        out: (n,), this rank's part of `buffer`, or other memory; its values are undefined before `wait`.
        reduce_dtype: all parts, including this rank's, are rounded to this dtype, exchanged, and summed in
            fp32 in rank order. Not over NCCL (use `RoundedSums`). None: the dtype of `buffer`.
    """
    if follows_on_device(group):
        assert reduce_dtype is None, "RoundedSums does that over NCCL"
        return CommHandle([_reduce_scatter(out, buffer, group=group, async_op=True)])
    own = (buffer if reduce_dtype is None else buffer.to(reduce_dtype)).chunk(group.size())
    received = [part if rank == group.rank() else torch.empty_like(part) for rank, part in enumerate(own)]
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    if others and reduce_dtype is None and out.untyped_storage()._cdata != buffer.untyped_storage()._cdata:
        received[others[-1]] = out  # the last sum is written there

    def add_up() -> None:
        if reduce_dtype is not None:
            sum_in_fp32(received, out)
            return
        if len(received) == 1:
            out.copy_(received[0])
            return
        # Partial sums go to a received part, because `out` may be a part that is not yet summed.
        partial_sum = received[1] if group.rank() == 0 else received[0]
        total = received[0]
        for part in received[1:-1]:
            total = torch.add(total, part, out=partial_sum)
        torch.add(total, received[-1], out=out)

    if group.size() == 1:  # callers may read the result of a single rank without `wait`
        add_up()
        return CommHandle([])
    return CommHandle(_exchange(own, received, group), add_up)


def sum_in_fp32(parts: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of `parts`, in order, to `out`, rounded once; on CUDA, `parts` is a single tensor."""
    if out.is_cuda:
        # Imported here, because only torch's CUDA builds come with Triton.
        from patch.distributed.part_sums import add_parts

        assert isinstance(parts, torch.Tensor)
        add_parts(parts, out)
        return
    total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    total.copy_(parts[0])
    for part in parts[1:]:
        total += part
    out.copy_(total)


def start_all_gather(buffer: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> CommHandle:
    """Start an all-gather into `buffer` (group size * n,); `shard` (n,) is this rank's part of `buffer`."""
    if group.size() == 1:
        return CommHandle([])
    # gloo's all-gather is a ring, with two in flight at a time. Point-to-point messages would put a whole
    # model in flight at once, and delay the weights of the next forward: 5 % of a step of four ranks.
    return CommHandle([_all_gather(buffer, shard, group=group, async_op=True)])


def start_all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> CommHandle:
    """Start an all-to-all; both tensors are (group size * n,). Do not change `sent` before `wait`."""
    return CommHandle([dist.all_to_all_single(received, sent, group=group, async_op=True)])


def start_swap(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, step: int) -> CommHandle:
    """Send to the rank `step` places after this rank in the group's ring, and receive from `step` before.

    Both tensors are contiguous; `sent` must not change before `wait`. All ranks call this in the same order.
    """
    target, source = ((group.rank() + places) % group.size() for places in (step, -step))
    # In one batch, because otherwise NCCL would send before it receives on all ranks, and deadlock.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, group=group, group_peer=source),
            dist.P2POp(dist.isend, sent, group=group, group_peer=target),
        ]
    )
    return CommHandle(works)


def _exchange(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Send `sent[r]` to, and receive `received[r]` from, every other rank r."""
    # Point to point: gloo's threads stay free for more urgent collectives; its all-to-all was no faster.
    sources = [(group.rank() - step) % group.size() for step in range(1, group.size())]
    # Receives first: gloo's clear-to-send message would queue behind the data that is sent to that rank.
    works = [dist.irecv(received[source], group=group, group_src=source) for source in sources]
    works += [dist.isend(sent[target], group=group, group_dst=target) for target in reversed(sources)]
    return [work for work in works if work is not None]


class RoundedSums:
    """Reduce-scatters over NCCL that send rounded gradients and sum them in fp32, overlapped with compute.

    Over gloo, use `start_reduce_scatter`. Two messages are in flight: one is rounded or summed, while the
    other is sent. Each stream has a send and a receive buffer, and processes its messages in order, however
    far the host is ahead.

    Args:
        numel: elements of the largest buffer.
        reduce_dtype: dtype of the sent gradients.
        device: device of the gradients.
    """

    def __init__(self, numel: int, reduce_dtype: torch.dtype, device: torch.device) -> None:
        self._streams = streams_of(device)
        self._buffers = [
            tuple(torch.empty(numel, dtype=reduce_dtype, device=device) for _ in ("sent", "received"))
            for _ in range(NUM_BF16_SENDS_IN_FLIGHT)
        ]
        self._asides = [
            stream_of(device, f"rounded sums {index}") for index in range(NUM_BF16_SENDS_IN_FLIGHT)
        ]
        for aside in self._asides:
            aside.wait_stream(self._streams.current_stream())
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Total bytes of the buffers."""
        return sum(part.nbytes for pair in self._buffers for part in pair)

    def start(self, buffer: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> CommHandle:
        """Sum `buffer` over the group and write this rank's shard of the sum to `out`.

        Args:
            buffer: (group size * n,), at most `numel` elements; not changed, unless `out` is a part of it.
            out: (n,), this rank's part of `buffer`, or other memory.
        """
        self._turn = (self._turn + 1) % NUM_BF16_SENDS_IN_FLIGHT
        aside = self._asides[self._turn]
        aside.wait_stream(self._streams.current_stream())
        with self._streams.stream(aside):
            sent, received = (part[: buffer.numel()] for part in self._buffers[self._turn])
            sent.copy_(buffer)
            start_all_to_all(received, sent, group).wait()
            sum_in_fp32(received.view(group.size(), -1), out)
            return queued_on(aside)
