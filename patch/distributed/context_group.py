"""Context parallelism (CP): the tokens of each rank, defined only here, and CP's messages.

A sequence of S tokens is cut into 2 * CP chunks. Rank r has chunk r and chunk 2 * CP - 1 - r, in this order,
so that causal attention is equal work on every rank. A rank's tokens stay in the order of their positions.
Messages use a ring or all-to-all, over NCCL and gloo.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from patch.distributed.async_collectives import CommHandle, start_swap


class TokenSpan(NamedTuple):
    """Tokens that are contiguous both in the sequence and on their rank."""

    position: int
    """Position of the first token in the sequence."""
    offset: int
    """Index of the first token among the rank's tokens."""
    length: int


class Zigzag(NamedTuple):
    """One rank's part of every sequence; the whole sequence if CP = 1."""

    rank: int
    """Index of the rank in its context-parallel group."""
    size: int
    """Number of ranks of the group."""

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Zigzag:
        """Return this rank's part in megatron-core's context-parallel group."""
        return cls(group.rank(), group.size())

    def spans(self, length: int) -> list[TokenSpan]:
        """Return the rank's two chunks; `length` is S, a multiple of 2 * CP."""
        chunk, remainder = divmod(length, 2 * self.size)
        assert remainder == 0, "validate_run lets only these through"
        late = 2 * self.size - 1 - self.rank
        return [TokenSpan(self.rank * chunk, 0, chunk), TokenSpan(late * chunk, chunk, chunk)]

    def spans_within(self, length: int, begin: int, end: int) -> list[TokenSpan]:
        """Return the rank's tokens with positions in [begin, end), as at most two spans; `length` is S."""
        spans = []
        for span in self.spans(length):
            first, last = max(begin, span.position), min(end, span.position + span.length)
            if first < last:
                spans.append(TokenSpan(first, span.offset + first - span.position, last - first))
        return spans

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the rank's part of a tensor, cut along its sequence dimension `dim`; no copy if CP = 1."""
        if self.size == 1:
            return whole
        spans = self.spans(whole.shape[dim])
        return torch.cat([whole.narrow(dim, span.position, span.length) for span in spans], dim)


WHOLE = Zigzag(0, 1)
"""The layout of a run without context parallelism."""


def join_parts(parts: torch.Tensor) -> torch.Tensor:
    """Join the parts of all ranks, [CP, S / CP, ...], into whole sequences in position order, [S, ...]."""
    early, late = parts.unflatten(1, (2, -1)).unbind(1)
    return torch.cat([early, late.flip(0)]).flatten(0, 1)


def split_parts(whole: torch.Tensor, size: int) -> torch.Tensor:
    """Invert `join_parts`: [S, ...] -> [CP, S / CP, ...], for `size` ranks."""
    early, late = whole.unflatten(0, (2 * size, -1)).chunk(2)
    return torch.stack([early, late.flip(0)], dim=1).flatten(1, 2)


class Shift:
    """A ring shift in flight: a tensor to the next rank, and a tensor from the previous rank."""

    def __init__(self, sent: torch.Tensor, received: torch.Tensor, pending: CommHandle) -> None:
        self._sent, self._received, self._pending = sent, received, pending

    def wait(self) -> torch.Tensor:
        """Wait for the tensor from the previous rank and return it (stream-ordered on CUDA)."""
        self._pending.wait()
        return self._received


class ContextGroup:
    """megatron-core's context-parallel group as a ring."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.zigzag = Zigzag.of(group)

    def start_shift(self, tensor: torch.Tensor, *, is_reverse: bool = False) -> Shift:
        """Send a contiguous tensor to the next rank; receive a tensor of equal shape from the previous rank.

        `is_reverse` swaps directions. All ranks call this in the same order. `tensor` must not change before
        `wait` returns.
        """
        received = torch.empty_like(tensor)
        pending = start_swap(tensor, received, self._group, -1 if is_reverse else 1)
        return Shift(tensor, received, pending)

    def all_to_all(self, parts: torch.Tensor) -> torch.Tensor:
        """Send part r of [CP, ...] to rank r; return [CP, ...], the parts from all ranks for this rank."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self._group)
        return received
