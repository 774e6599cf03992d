"""Context parallelism (CP): which tokens of a sequence a rank has, known here alone, and CP's messages.

A sequence of S tokens is cut into 2 * CP chunks. Rank r has chunk r and chunk 2 * CP - 1 - r, in this order,
so that causal attention is as much work on every rank: what the early chunk lacks, the late one has. A rank's
tokens stay in the order of their positions. Messages go around a ring of neighbours, or all-to-all, over NCCL
and gloo.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from patch.distributed.async_collectives import Pending, start_swap


class TokenSpan(NamedTuple):
    """Tokens that are neighbours both in the sequence and on their rank."""

    position: int
    """Place of the first token in the sequence."""
    offset: int
    """Place of the first token among those of its rank."""
    length: int


class Zigzag(NamedTuple):
    """One rank's part of every sequence. With one rank it is the whole sequence."""

    rank: int
    """Number of the rank in its context-parallel group."""
    size: int
    """Ranks of the group."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Zigzag:
        """This rank's part in megatron-core's context-parallel group."""
        return cls(group.rank(), group.size())

    def spans(self, length: int) -> list[TokenSpan]:
        """The rank's two chunks.

        Args:
            length: S, tokens of the whole sequence; a multiple of 2 * CP.
        """
        chunk, remainder = divmod(length, 2 * self.size)
        assert remainder == 0, "validate_run lets only these through"
        late = 2 * self.size - 1 - self.rank
        return [TokenSpan(self.rank * chunk, 0, chunk), TokenSpan(late * chunk, chunk, chunk)]

    def spans_within(self, length: int, begin: int, end: int) -> list[TokenSpan]:
        """The rank's tokens with positions from `begin` to before `end`, as at most two spans.

        Args:
            length: S, tokens of the whole sequence.
            begin: the first position.
            end: the position after the last one.
        """
        spans = []
        for span in self.spans(length):
            first, last = max(begin, span.position), min(end, span.position + span.length)
            if first < last:
                spans.append(TokenSpan(first, span.offset + first - span.position, last - first))
        return spans

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """The rank's part of a tensor whose dimension `dim` is the sequence: a copy, or the whole itself."""
        if self.size == 1:
            return whole
        spans = self.spans(whole.shape[dim])
        return torch.cat([whole.narrow(dim, span.position, span.length) for span in spans], dim)


WHOLE = Zigzag(0, 1)
"""The layout of a run without context parallelism."""


def join_parts(parts: torch.Tensor) -> torch.Tensor:
    """The parts of all ranks, [CP, S / CP, ...], as whole sequences in the order of positions, [S, ...]."""
    early, late = parts.unflatten(1, (2, -1)).unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def split_parts(whole: torch.Tensor, size: int) -> torch.Tensor:
    """The reverse of `join_parts`: [S, ...] in, [CP, S / CP, ...] out, for `size` ranks."""
    early, late = whole.unflatten(0, (2 * size, -1)).chunk(2)
    return torch.stack([early, late.flip(0)], dim=1).flatten(1, 2)


class Shift:
    """A tensor that is on its way to the next rank, while another one comes from the rank before."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, pending: Pending) -> None:
        self._sent, self._received, self._pending = sent, received, pending

    def wait(self) -> torch.Tensor:
        """Wait for the tensor from the previous rank of the ring and return it (stream-ordered on CUDA)."""
        self._pending.wait()
        return self._received


class ContextGroup:
    """The ranks that share each sequence, as a ring.

    Args:
        group: megatron-core's context-parallel group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.zigzag = Zigzag.of(group)

    def start_shift(self, tensor: torch.Tensor, *, is_reverse: bool = False) -> Shift:
        """Send a contiguous tensor to the next rank, and receive one of the same shape from the rank before.

        All ranks make these calls in the same order. The tensor must not be changed before `wait`.

        Args:
            tensor: what is sent.
            is_reverse: send to the rank before, and receive from the next one.
        """
        rank, size = self.zigzag
        distance = -1 if is_reverse else 1
        received = torch.empty_like(tensor)
        target, source = (rank + distance) % size, (rank - distance) % size
        pending = start_swap(tensor, received, self._group, target=target, source=source)
        return Shift(tensor, received, pending)

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Part r of [CP, ...] goes to rank r; out: [CP, ...], the part that each rank had for this one."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received
