"""Asynchronous collectives on slices of flat buffers, the same calls over NCCL and gloo.

Each `start_*` returns at once; `Pending.wait` makes the result visible to what follows on this rank's
compute stream (CUDA) or in this thread (CPU), and adds the time that compute stood still to a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist

# torch 2.13 renamed the collectives on one tensor; the old names, which 2.11 has, warn there.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class WaitClock:
    """Adds up how long compute waited for communication."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple] = []

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A stretch in which compute does nothing but wait."""
        begin = self._mark()
        yield
        self._marks.append((begin, self._mark()))

    def read_ms(self) -> float:
        """Milliseconds waited since the last call; on CUDA the host waits for the last mark."""
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
    """A collective under way.

    It lives until somebody has waited for it, also when its owner is gone: gloo cannot do without the memory
    of a message under way.
    """

    _under_way: ClassVar[set[Pending]] = set()

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], None] | None = None) -> None:
        self._works, self._finish = works, finish
        if self._works:
            self._under_way.add(self)

    def join(self) -> None:
        """Let the current CUDA stream, or this thread, go on only with what arrived."""
        for work in self._works:
            work.wait()

    def wait(self, clock: WaitClock) -> None:
        """Let compute go on only with the result."""
        with clock.waiting():
            self.join()
        self._under_way.discard(self)
        if self._finish is not None:
            self._finish()


def start_all_reduce(buffer: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum `buffer` over the group, in place."""
    if group.size() == 1:
        return Pending([])
    return Pending([dist.all_reduce(buffer, group=group, async_op=True)])


def start_reduce_scatter(buffer: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Sum `buffer` over the group and leave this rank's shard in `out`.

    Over gloo the parts are exchanged and summed here in the order of ranks: gloo's own reduce-scatter
    moves as many bytes as its all-reduce.

    Args:
        buffer: (P * n,), not changed except where `out` is its own part of it.
        out: (n,), this rank's part of `buffer` or memory of its own.
    """
    if dist.get_backend(group) == "nccl":
        return Pending([_reduce_scatter(out, buffer, group=group, async_op=True)])
    own = buffer.chunk(group.size())
    received = [part if rank == group.rank() else torch.empty_like(part) for rank, part in enumerate(own)]

    def add_up() -> None:
        *parts, last = received
        if not parts:
            out.copy_(last)
            return
        total = parts[0]
        for part in parts[1:]:
            # Into received memory: `out` may be a part that is still to be added.
            total = torch.add(total, part, out=received[1] if group.rank() == 0 else received[0])
        torch.add(total, last, out=out)

    return Pending(_exchange(own, received, group), add_up)


def start_all_gather(buffer: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup) -> Pending:
    """Fill `buffer` with the shards of all ranks; `shard` is this rank's part of `buffer` itself."""
    if dist.get_backend(group) == "nccl":
        return Pending([_all_gather(buffer, shard, group=group, async_op=True)])
    return Pending(_exchange([shard] * group.size(), buffer.chunk(group.size()), group))


def _exchange(
    sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Send `sent[r]` to, and receive `received[r]` from, every other rank r.

    Point to point, because gloo's all-to-all and all-gather copy through memory of their own.
    """
    works = []
    for step in range(1, group.size()):
        source, target = (group.rank() - step) % group.size(), (group.rank() + step) % group.size()
        works.append(dist.irecv(received[source], group=group, group_src=source))
        works.append(dist.isend(sent[target], group=group, group_dst=target))
    return [work for work in works if work is not None]
