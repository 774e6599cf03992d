"""Ring attention: keys and values go around the ranks in pieces while attention is computed.

Before a rank computes with a piece, it starts to send the piece on and to receive the next piece. Results are
merged by the log-sum-exp of their scores (Liu et al., arXiv:2310.01889). In backward the pieces go around in
reverse, starting at the rank that had each piece last. The gradient of a piece follows the piece. Each rank
adds its part, and the owner adds the last part. So every message is in flight while a rank computes.

For backward a rank saves its queries, output and log-sum-exp, and the last piece that it received instead of
its own. Two more pieces are in memory while it computes. Partial results and gradients in flight are at least
float32. On CUDA one Triton kernel merges a tile, and writes instead of merging for the first tile of a query
(kernels/fused.py). It differs from the torch form by at most 2e-6 of the largest value.

Shapes: B rows, N query heads, G key/value heads, s = S / CP tokens of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from patch.compat.attention_kernels import attend_backward, attend_with_lse
from patch.distributed.context_group import ContextGroup, Shift
from patch.model.attention.ring_tiles import Tile

Tiles = Callable[[int], Iterable[Tile]]
"""Function from a rank to the tiles of the rank's piece."""


class RingKernels(NamedTuple):
    """How a tile is computed."""

    scale: float
    is_fused: bool = False
    """Whether one Triton kernel merges a tile."""
    takes_cudnn: bool = False
    """Whether cuDNN computes attention where possible."""


class RingAttention(torch.autograd.Function):
    """Attention from this rank's queries to the keys of all ranks. A collective over the group.

    `apply` takes [B, N, s, D] and [B, G, s, D], with G dividing N, and returns [B, N, s, D]. In `tiles`,
    every query must see a key of this rank's own piece.
    """

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
        """See the class."""
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
        """Return the gradients of queries, keys and values."""
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
            # The previous rank has this piece in the next step. In the last step each rank has its own.
            returning = ctx.group.start_shift(of_piece, is_reverse=True) if following is not None else None
            piece = _received(following, piece)
        of_key, of_value = of_piece.to(query.dtype).unbind(0)
        return of_query.to(query.dtype), of_key, of_value, None, None, None


def _wide_like(query: torch.Tensor, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Return a new [B, N, s, D], at least float32, in the layout [s, B, N, D], which saves a later copy."""
    rows, heads, tokens, size = query.shape
    dtype = torch.promote_types(query.dtype, torch.float32)
    return make(tokens, rows, heads, size, dtype=dtype, device=query.device).permute(1, 2, 0, 3)


def _received(following: Shift | None, piece: torch.Tensor) -> torch.Tensor:
    return piece if following is None else following.wait()


def _bias(tile: Tile, query: torch.Tensor) -> torch.Tensor | None:
    """Return [queries, keys] of a tile with a band: 0 where a query sees the key, else -inf."""
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
    """Attend to the keys of the tile, and merge the result into `out` and `lse`."""
    key, value = piece[:, tile.rows, :, tile.keys]
    part, part_lse = attend_with_lse(
        query[tile.rows, :, tile.queries], key, value, _bias(tile, query),
        is_causal=tile.is_causal, scale=kernels.scale, takes_cudnn=kernels.takes_cudnn,
    )  # fmt: skip
    out, lse = out[tile.rows, :, tile.queries], lse[tile.rows, :, tile.queries]
    if kernels.is_fused:
        from patch.model.kernels.fused import merge_attention  # only CUDA builds of torch have Triton

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
    queries = tile.rows, slice(None), tile.queries
    key, value = piece[:, tile.rows, :, tile.keys]
    part, *parts = attend_backward(
        gradient[queries], query[queries], key, value, _bias(tile, query), out[queries], lse[queries],
        is_causal=tile.is_causal, scale=kernels.scale, takes_cudnn=kernels.takes_cudnn,
    )  # fmt: skip
    of_query[queries].add_(part)
    for target, summand in zip(of_piece, parts, strict=True):
        target[tile.rows, :, tile.keys].add_(summand)
