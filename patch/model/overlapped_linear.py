"""Products of linear layers that overlap with their tensor-parallel collectives, chunk by chunk.

megatron-core's layers wait for collectives in forward: with sequence parallelism (SP) for an all-gather
before column layers and a reduce-scatter after row layers, without SP for an all-reduce after row layers.
Here the product is split into chunks of rows: each chunk is computed when it has arrived, or sent when it is
computed. In backward the collectives of the input's gradient also overlap with the weight's gradient, which
is one product as in megatron-core.

Shapes: S sequence (S / TP per rank with SP), B micro-batch, I inputs and O outputs of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from patch.distributed.tensor_group import ChunkedAllReduce, RingAllGather, RingReduceScatter, TensorGroup
from patch.model.weight_gradient import weight_gradient


class OverlappedColumn(torch.autograd.Function):
    """A column-parallel product: forward overlaps with the all-gather (SP), backward with the sum."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        group: TensorGroup,
        is_cut: bool,
    ) -> torch.Tensor:
        """[S, B, I], with SP [S / TP, B, I], in; [S, B, O] out."""
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.is_cut, ctx.weight = group, is_cut, weight
        rows = _rows(input)
        product = _multiply_gathered(RingAllGather(rows, group), weight.t()) if is_cut else rows @ weight.t()
        if bias is not None:
            product += bias
        return product.view(-1, input.shape[1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        (input, weight), group = ctx.saved_tensors, ctx.group
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        rows = _rows(gradient)
        gathered = None
        if needs_weight and ctx.is_cut:
            gathered = RingAllGather(_rows(input), group, start_all=True)
        sums = _multiply_and_sum(rows, weight, group, is_cut=ctx.is_cut)
        of_weight = None
        if needs_weight:
            whole = _rows(input) if gathered is None else gathered.wait()
            of_weight = weight_gradient(ctx.weight, rows, whole)
        of_bias = rows.sum(dim=0) if needs_bias else None
        of_input = sums.wait().view(-1, gradient.shape[1], weight.shape[1])
        return of_input, of_weight, of_bias, None, None


class OverlappedRow(torch.autograd.Function):
    """A row-parallel product: forward overlaps with the sum over ranks, backward with the all-gather (SP)."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, group: TensorGroup, is_cut: bool
    ) -> torch.Tensor:
        """[S, B, I] in; [S, B, O], with SP [S / TP, B, O], out."""
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.is_cut, ctx.weight = group, is_cut, weight
        sums = _multiply_and_sum(_rows(input), weight.t(), group, is_cut=is_cut)
        return sums.wait().view(-1, input.shape[1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of input and weight."""
        input, weight = ctx.saved_tensors
        rows = _rows(gradient)
        if ctx.is_cut:
            gathered = RingAllGather(rows, ctx.group)
            of_input = _multiply_gathered(gathered, weight)
            rows = gathered.wait()
        else:
            of_input = rows @ weight
        of_weight = weight_gradient(ctx.weight, rows, _rows(input)) if ctx.needs_input_grad[1] else None
        return of_input.view(-1, gradient.shape[1], weight.shape[1]), of_weight, None, None


def _rows(hidden: torch.Tensor) -> torch.Tensor:
    return hidden.contiguous().flatten(0, 1)


def _multiply_gathered(rows: RingAllGather, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of all ranks, [TP * R, I], with [I, O]."""
    product = matrix.new_empty(rows.num_rows, matrix.shape[1])
    for place, piece in rows.pieces():
        torch.mm(piece, matrix, out=product[place])
    return product


def _multiply_and_sum(
    rows: torch.Tensor, matrix: torch.Tensor, group: TensorGroup, *, is_cut: bool
) -> RingReduceScatter | ChunkedAllReduce:
    """Multiply [M, I] and [I, O] and start the sum over ranks; with `is_cut` a reduce-scatter."""
    product = rows.new_empty(len(rows), matrix.shape[1])
    sums = RingReduceScatter(product, group) if is_cut else ChunkedAllReduce(product, group)
    for place in sums.pieces():
        torch.mm(rows[place], matrix, out=product[place])
    return sums
