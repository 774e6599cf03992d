"""How context parallelism (CP) cuts a sequence: the one place that knows which tokens a rank has.

A sequence of S tokens is cut into 2 * CP chunks. Rank r has chunk r and chunk 2 * CP - 1 - r, in this order,
so that causal attention is as much work on every rank: what the early chunk lacks, the late one has. A rank's
tokens stay in the order of their positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist


class Span(NamedTuple):
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

    def spans(self, length: int) -> list[Span]:
        """The rank's two chunks.

        Args:
            length: S, tokens of the whole sequence; a multiple of 2 * CP.
        """
        chunk, remainder = divmod(length, 2 * self.size)
        assert remainder == 0, "validate_run lets only these through"
        late = 2 * self.size - 1 - self.rank
        return [Span(self.rank * chunk, 0, chunk), Span(late * chunk, chunk, chunk)]

    def spans_within(self, length: int, begin: int, end: int) -> list[Span]:
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
                spans.append(Span(first, span.offset + first - span.position, last - first))
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
