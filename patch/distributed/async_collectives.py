"""Asynchronous collectives on slices of flat buffers, the same calls over NCCL and gloo.

Each `start_*` returns at once. `Pending.wait` makes this rank's compute stream (CUDA) or this thread (CPU)
wait for the result, and measures how long compute waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from patch.compat.torch_internals import region
from patch.device import stream_of, streams_of
from patch.layout.buckets import ROUNDED_UNDER_WAY

# torch 2.13 renamed the collectives on one tensor, and warns of the old names, which 2.11 still needs.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

SMALL_VALUES = "small values"
"""The stream on which the host reads what ranks have summed."""


class WaitClock:
    """Adds up how long compute waited for communication."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which compute only waits; its duration is added."""
        begin = self._mark()
        with region("wait"):
            yield
        self._marks.append((begin, self._mark()))

    def read_ms(self) -> float:
        """Milliseconds that compute waited since the last call; on CUDA the host waits for the last mark."""
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


class Pending:
    """A collective that was started.

    The class keeps a reference to it until `wait` is called, even if the caller drops it: gloo needs the
    memory of a message until the message has arrived.

    Args:
        works: what torch returned for each part of the collective.
        finish: called by `wait` when all parts have ended.
    """

    _then: Callable[[], Pending] | None = None
    """Starts another collective with the result of this one."""

    _unfinished: ClassVar[set[Pending]] = set()

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], None] | None = None) -> None:
        self._works, self._finish = works, finish
        if self._works:
            self._unfinished.add(self)

    def join(self) -> None:
        """Make the current CUDA stream, or on a CPU this thread, wait for the collective."""
        for work in self._works:
            work.wait()

    def wait(self, clock: WaitClock | None = None) -> None:
        """Make compute wait for the result, and add the time to `clock` if there is one."""
        with nullcontext() if clock is None else clock.waiting():
            self.join()
        self._unfinished.discard(self)
        if self._finish is not None:
            self._finish()
        if self._then is not None:
            self._then().wait(clock)

    def then(self, start: Callable[[], Pending], group: dist.ProcessGroup, device: torch.device) -> Pending:
        """Another collective that needs the result of this one; only the one returned is waited for.

        Over NCCL it follows on the device, while compute goes on. Over gloo `wait` starts it, since no one
        else learns that this one has ended.

        Args:
            start: starts the other one.
            group: the ranks of this one.
            device: of its tensors.
        """
        if not follows_on_device(group):
            self._then = start
            return self
        streams, aside = streams_of(device), stream_of(device, "collectives that follow others")
        aside.wait_stream(streams.current_stream(device))
        with streams.stream(aside):
            self.wait()
            return start()


class _Queued(dist.Work):
    """Work that a stream has been given by now."""

    def __init__(self, streams: Any, stream: torch.cuda.Stream) -> None:
        super().__init__()
        self._streams, self._end = streams, stream.record_event()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Make the current stream wait for it."""
        self._streams.current_stream().wait_event(self._end)
        return True


def queued_on(stream: torch.cuda.Stream, device: torch.device) -> Pending:
    """All that a stream of the device has been given by now, to wait for as for a collective."""
    return Pending([_Queued(streams_of(device), stream)])


def follows_on_device(group: dist.ProcessGroup) -> bool:
    """Whether the device waits for messages of a group, as for NCCL's, and not the host, as for gloo's."""
    return dist.get_backend(group) == "nccl"


def start_all_reduce(
    buffer: torch.Tensor, group: dist.ProcessGroup, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Pending:
    """Sum `buffer` over the group, in place, or combine it by `op`."""
    if group.size() == 1:
        return Pending([])
    return Pending([dist.all_reduce(buffer, op, group=group, async_op=True)])


def read_values(reduced: torch.Tensor, pending: Pending, clock: WaitClock) -> list[float]:
    """The few values of a small reduction that is under way.

    It is read on another stream than compute's, so the host does not wait for what is queued there.

    Args:
        reduced: what `start_all_reduce` was given.
        pending: what it returned.
        clock: gets the time that this thread waits for the other ranks.
    """
    streams = streams_of(reduced.device)
    with streams.stream(stream_of(reduced.device, SMALL_VALUES)):
        pending.wait(clock)
        return reduced.flatten().tolist()


def start_reduce_scatter(
    buffer: torch.Tensor,
    out: torch.Tensor,
    group: dist.ProcessGroup,
    travels_as: torch.dtype | None = None,
) -> Pending:
    """Sum `buffer` over the group and write this rank's shard of the sum to `out`.

    Over gloo the ranks exchange their parts and sum them in the order of ranks, because gloo's own
    reduce-scatter moves as many bytes as its all-reduce.

    Args:
        buffer: (group size * n,); not changed, unless `out` is a part of it.
        out: (n,), this rank's part of `buffer`, or other memory, which gets other values before `wait`.
        group: the ranks that take part.
        travels_as: all parts, the own one too, are rounded to this type, exchanged, and added up in fp32 in
            the order of ranks; not over NCCL (`RoundedSums`). None: the type of `buffer`.
    """
    if follows_on_device(group):
        assert travels_as is None, "RoundedSums does that over NCCL"
        return Pending([_reduce_scatter(out, buffer, group=group, async_op=True)])
    own = (buffer if travels_as is None else buffer.to(travels_as)).chunk(group.size())
    received = [part if rank == group.rank() else torch.empty_like(part) for rank, part in enumerate(own)]
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    if others and travels_as is None and out.untyped_storage()._cdata != buffer.untyped_storage()._cdata:
        received[others[-1]] = out  # the last sum is written there

    def add_up() -> None:
        if travels_as is not None:
            sum_in_fp32(received, out)
            return
        if len(received) == 1:
            out.copy_(received[0])
            return
        # Partial sums go to a received part, because `out` may be a part that has not been added yet.
        partial_sum = received[1] if group.rank() == 0 else received[0]
        total = received[0]
        for part in received[1:-1]:
            total = torch.add(total, part, out=partial_sum)
        torch.add(total, received[-1], out=out)

    if group.size() == 1:  # who knows that there is no other rank reads it without a wait
        add_up()
        return Pending([])
    return Pending(_exchange(own, received, group), add_up)


def sum_in_fp32(parts: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of `parts`, in their order, to `out`, rounded once; on CUDA they are one tensor."""
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


def start_all_gather(buffer: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Fill `buffer` with the shards of all ranks.

    Args:
        buffer: (group size * n,).
        shard: (n,), this rank's part of `buffer` itself.
        group: the ranks that take part.
    """
    if group.size() == 1:
        return Pending([])
    # gloo's is a ring, of which two travel at a time. As messages between all ranks, those of a whole model
    # are under way at once, and what the next forward needs first came later: 5 % of a step of four ranks.
    return Pending([_all_gather(buffer, shard, group=group, async_op=True)])


def start_all_to_all(received: torch.Tensor, sent: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Send each rank its part of `sent`, and write what each sends to this rank's to `received`.

    Args:
        received: (group size * n,).
        sent: (group size * n,), not to be changed before `wait`.
        group: the ranks that take part.
    """
    return Pending([dist.all_to_all_single(received, sent, group=group, async_op=True)])


def start_swap(
    sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup, *, target: int, source: int
) -> Pending:
    """Send a tensor to one rank of the group, and receive another from one.

    All ranks make these calls in the same order.

    Args:
        sent: contiguous; not to be changed before `wait`.
        received: contiguous; filled when `wait` returns.
        group: the ranks that take part.
        target: the rank within the group that `sent` is for.
        source: the rank within the group that sends what is received.
    """
    # In one batch, because NCCL would otherwise send before it receives, on all ranks, and wait for ever.
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.irecv, received, group=group, group_peer=source),
            dist.P2POp(dist.isend, sent, group=group, group_peer=target),
        ]
    )
    return Pending(works)


def _exchange(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Send `sent[r]` to, and receive `received[r]` from, every other rank r.

    Point to point: gloo's threads stay free for the collectives that ranks wait for, and its all-to-all was
    no faster.
    """
    sources = [(group.rank() - step) % group.size() for step in range(1, group.size())]
    # Receives first: gloo tells a sender that it may begin, and that would queue behind what is sent to it.
    works = [dist.irecv(received[source], group=group, group_src=source) for source in sources]
    works += [dist.isend(sent[target], group=group, group_dst=target) for target in reversed(sources)]
    return [work for work in works if work is not None]


class RoundedSums:
    """Reduce-scatters over NCCL that send rounded gradients and add them up in fp32, beside compute.

    Over gloo `start_reduce_scatter` does it.

    Two messages are under way: one is rounded, or added up, while the other is sent. Each stream has a buffer
    to send from and one to receive in, and does one message after the other, however far the host is ahead.

    Args:
        numel: of the largest buffer.
        travels_as: to which gradients are rounded.
        device: of the gradients.
    """

    def __init__(self, numel: int, travels_as: torch.dtype, device: torch.device) -> None:
        self._device, self._streams = device, streams_of(device)
        self._buffers = [
            tuple(torch.empty(numel, dtype=travels_as, device=device) for _ in ("sent", "received"))
            for _ in range(ROUNDED_UNDER_WAY)
        ]
        self._asides = [stream_of(device, f"rounded sums {index}") for index in range(ROUNDED_UNDER_WAY)]
        for aside in self._asides:
            aside.wait_stream(self._streams.current_stream())
        self._turn = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(part.nbytes for pair in self._buffers for part in pair)

    def start(self, buffer: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> Pending:
        """Sum `buffer` over the group and write this rank's shard of the sum to `out`.

        Args:
            buffer: (group size * n,), of at most `numel` elements; not changed, unless `out` is a part of it.
            out: (n,), this rank's part of `buffer`, or other memory.
            group: the ranks that take part.
        """
        self._turn = (self._turn + 1) % ROUNDED_UNDER_WAY
        aside = self._asides[self._turn]
        aside.wait_stream(self._streams.current_stream())
        with self._streams.stream(aside):
            sent, received = (part[: buffer.numel()] for part in self._buffers[self._turn])
            sent.copy_(buffer)
            start_all_to_all(received, sent, group).wait()
            sum_in_fp32(received.view(group.size(), -1), out)
            return queued_on(aside, self._device)
