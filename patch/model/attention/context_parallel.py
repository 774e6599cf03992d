"""Attention over sequences that are split over context-parallel ranks (`--cp-comm-type`).

    p2p     ring attention: keys and values go around the ranks (ring_attention.py)
    a2a     all-to-all: each rank gets full sequences of a part of the heads, attends as without CP, and
            returns the result (Jacobs et al., arXiv:2309.14509)

All other modules work on a rank's own tokens, as `patch.distributed.context_group` splits them.

Shapes: S sequence, s = S / CP tokens of this rank, B micro-batch, N query heads, G key/value heads of this TP
rank, D head size.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.nn.attention import SDPBackend

from patch.distributed.context_group import ContextGroup, join_parts, split_parts
from patch.model.attention.core_attention import CausalAttention
from patch.model.attention.packed_sequences import PackedSequences
from patch.model.attention.ring_attention import RingAttention, RingKernels
from patch.model.attention.ring_tiles import PlacedSequence, tiles_of_piece


class ContextParallelAttention(CausalAttention):
    """CausalAttention over a context-parallel group. With a2a, CP must divide the query heads per TP rank."""

    def __init__(
        self,
        *,
        cp_comm_type: str,
        pg_collection: ProcessGroupCollection,
        is_fused: bool = False,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._is_ring, self._is_fused = cp_comm_type == "p2p", is_fused
        self.group = ContextGroup(pg_collection.cp)

    def _attend_tokens(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed_seq_params: PackedSequences | None,
    ) -> torch.Tensor:
        """[s, B, N or G, D] in, [s, B, N * D] out, on all ranks of the group together."""
        if self._is_ring:
            return self._attend_around_ring(query, key, value, packed_seq_params)
        query, key, value = gather_sequences(query, key, value, self.group)
        return scatter_sequences(super()._attend_tokens(query, key, value, packed_seq_params), self.group)

    def _attend_around_ring(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences | None
    ) -> torch.Tensor:
        zigzag = self.group.zigzag
        length = query.shape[0] * zigzag.size
        tiles = partial(tiles_of_piece, _placed(packed, length), zigzag, length=length, window=self.window)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        # cuDNN builds a plan for each shape. Packed sequences and windows have many shapes.
        has_few_shapes = packed is None and self.window is None
        takes_cudnn = has_few_shapes and self.backends[:1] == [SDPBackend.CUDNN_ATTENTION]
        kernels = RingKernels(self.scale, self._is_fused, takes_cudnn)
        context = RingAttention.apply(query, key, value, self.group, tiles, kernels)
        return context.permute(2, 0, 1, 3).flatten(2)


def _placed(packed: PackedSequences | None, length: int) -> list[PlacedSequence]:
    if packed is None:
        return [PlacedSequence(slice(None), 0, length)]
    placed = []
    for begin, end in pairwise(accumulate(packed.lengths, initial=0)):
        row = begin // length
        placed.append(PlacedSequence(slice(row, row + 1), begin - row * length, end - row * length))
    return placed


def gather_sequences(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: ContextGroup
) -> list[torch.Tensor]:
    """Return full sequences of a part of the heads from split sequences of all heads, in one all-to-all.

    [s, B, N, D] and [s, B, G, D] in, with CP dividing N; [S, B, N / CP, D] and [S, B, heads, D] out. If CP
    does not divide the key/value heads, each of these heads is repeated until CP divides them.
    """
    size = group.zigzag.size
    repeats = math.lcm(key.shape[2], size) // key.shape[2]
    if repeats > 1:
        key, value = (heads.repeat_interleave(repeats, dim=2) for heads in (key, value))
    of_ranks = [heads.unflatten(2, (size, -1)) for heads in (query, key, value)]
    counts = [heads.shape[3] for heads in of_ranks]
    parts = torch.cat(of_ranks, dim=3).movedim(2, 0)
    return list(join_parts(_AllToAll.apply(parts, group)).split(counts, dim=2))


def scatter_sequences(context: torch.Tensor, group: ContextGroup) -> torch.Tensor:
    """Invert `gather_sequences` for the output: [S, B, N / CP * D] in, [s, B, N * D] out."""
    of_heads = _AllToAll.apply(split_parts(context, group.zigzag.size), group)
    return of_heads.movedim(0, 2).flatten(2)


class _AllToAll(torch.autograd.Function):
    """Send part r of [CP, ...] to rank r; backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, group: ContextGroup) -> torch.Tensor:
        ctx.group = group
        return group.all_to_all(parts.contiguous())

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_to_all(gradient.contiguous()), None
