"""Ring attention: keys and values travel around the ranks, piece by piece, while attention is computed.

Before a rank computes with a piece it starts to send it on, and to receive the next one. The results of the
pieces are merged by the log-sum-exp of their scores (Liu et al., arXiv:2310.01889). In backward the pieces
travel the same way home, from the rank that had each of them last; the gradient of a piece follows it, each
rank adds its part, and the owner adds the last one. So every message is sent while something is computed.

A rank keeps its own queries, output and log-sum-exp for backward, and the last piece that it had instead of
its own. It has room for two more pieces while it computes. Partial results and the gradients that travel are
float32 at least. On CUDA one Triton kernel merges a tile, and writes what is the first of a query
(kernels/fused.py); within 2e-6 of the largest number of the plain form here, which merges it into zeros.

Shapes: B rows, N query heads, G key/value heads, s = S / CP tokens of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from patch.compat.attention_kernels import attend_backward, attend_with_lse
from patch.distributed.context_group import ContextGroup, Shift
from patch.model.ring_tiles import Tile

Tiles = Callable[[int], Iterable[Tile]]
"""The tiles of the piece of a rank."""


class RingKernels(NamedTuple):
    """How a tile is computed."""

    scale: float
    """The factor of the scores."""
    is_fused: bool = False
    """Whether one Triton kernel merges it."""
    takes_cudnn: bool = False
    """Whether cuDNN attends, where it can."""


def attend_around_ring(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: ContextGroup,
    tiles: Tiles,
    kernels: RingKernels,
) -> torch.Tensor:
    """Attention of this rank's queries to the keys of all ranks. All ranks of the group call it together.

    Args:
        query: [B, N, s, D]; key, value: [B, G, s, D] with G dividing N.
        group: the ranks that share the sequences.
        tiles: what is computed with each rank's piece. Every query sees a key of this rank's own piece.
        kernels: see there.
    Returns:
        [B, N, s, D].
    """
    return _RingAttention.apply(query, key, value, group, tiles, kernels)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: ContextGroup,
        tiles: Tiles,
        kernels: RingKernels,
    ) -> torch.Tensor:
        out = _wide_like(query, torch.empty if kernels.is_fused else torch.zeros)
        lse = torch.full(query.shape[:-1], -torch.inf, dtype=out.dtype, device=query.device)
        piece = torch.stack((key, value))
        rank, num_ranks = group.zigzag
        for step in range(num_ranks):
            following = group.start_shift(piece) if step + 1 < num_ranks else None
            for tile in tiles((rank - step) % num_ranks):
                _attend_tile(query, piece, tile, kernels, out, lse)
            piece = _received(following, piece)
        narrow = out.to(query.dtype)
        ctx.save_for_backward(query, piece, narrow, lse)
        ctx.group, ctx.tiles, ctx.kernels = group, tiles, kernels
        return narrow

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, piece, out, lse = ctx.saved_tensors
        of_query, (rank, num_ranks) = _wide_like(query, torch.zeros), ctx.group.zigzag
        returning: Shift | None = None
        for step in range(num_ranks):
            following = ctx.group.start_shift(piece, is_reverse=True) if step + 1 < num_ranks else None
            of_piece = torch.zeros(piece.shape, dtype=of_query.dtype, device=query.device)
            for tile in ctx.tiles((rank + 1 + step) % num_ranks):
                _attend_tile_backward(
                    gradient, query, piece, tile, ctx.kernels, out, lse, of_query=of_query, of_piece=of_piece
                )
            if returning is not None:
                of_piece += returning.wait()
            # The rank before has this piece in the next step; in the last one each has its own.
            returning = ctx.group.start_shift(of_piece, is_reverse=True) if following is not None else None
            piece = _received(following, piece)
        of_key, of_value = of_piece.to(query.dtype).unbind(0)
        return of_query.to(query.dtype), of_key, of_value, None, None, None


def _wide_like(query: torch.Tensor, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """[B, N, s, D], float32 at least, in upstream's order of memory: what follows takes it without a copy."""
    rows, heads, tokens, size = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return make(tokens, rows, heads, size, dtype=dtype, device=query.device).permute(1, 2, 0, 3)


def _received(following: Shift | None, piece: torch.Tensor) -> torch.Tensor:
    return piece if following is None else following.wait()


def _bias(tile: Tile, query: torch.Tensor) -> torch.Tensor | None:
    """[queries, keys] of a tile with a band: 0 where a query sees the key, else -inf."""
    if tile.band is None:
        return None
    shape = tile.queries.stop - tile.queries.start, tile.keys.stop - tile.keys.start
    offset, window = tile.band
    visible = torch.ones(shape, dtype=torch.bool, device=query.device).tril(offset).triu(offset - window + 1)
    return torch.zeros(shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, -torch.inf)


def _attend_tile(
    query: torch.Tensor,
    piece: torch.Tensor,
    tile: Tile,
    kernels: RingKernels,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Attend to the tile's keys, and merge the result into the tile's part of `out` and `lse`."""
    key, value = piece[:, tile.rows, :, tile.keys]
    part, part_lse = attend_with_lse(
        query[tile.rows, :, tile.queries], key, value, _bias(tile, query),
        is_causal=tile.is_causal, scale=kernels.scale, takes_cudnn=kernels.takes_cudnn,
    )  # fmt: skip
    out, lse = out[tile.rows, :, tile.queries], lse[tile.rows, :, tile.queries]
    if kernels.is_fused:
        # Imported here, because only torch's CUDA builds come with Triton.
        from patch.model.kernels.fused import merge_attention

        merge_attention(out, lse, part, part_lse)
        return
    total = torch.logaddexp(lse, part_lse)
    out.mul_((lse - total).exp_()[..., None]).add_(part * (part_lse - total).exp_()[..., None])
    lse.copy_(total)


def _attend_tile_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    piece: torch.Tensor,
    tile: Tile,
    kernels: RingKernels,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    of_query: torch.Tensor,
    of_piece: torch.Tensor,
) -> None:
    """Add the tile's gradients to `of_query` and `of_piece`."""
    queries = tile.rows, slice(None), tile.queries
    key, value = piece[:, tile.rows, :, tile.keys]
    part, *parts = attend_backward(
        gradient[queries], query[queries], key, value, _bias(tile, query), out[queries], lse[queries],
        is_causal=tile.is_causal, scale=kernels.scale, takes_cudnn=kernels.takes_cudnn,
    )  # fmt: skip
    of_query[queries].add_(part)
    for target, summand in zip(of_piece, parts, strict=True):
        target[tile.rows, :, tile.keys].add_(summand)
