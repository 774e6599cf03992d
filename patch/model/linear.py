"""megatron-core's linear layers, sharded over tensor parallelism (TP) by columns or rows, built from parts.

    product     how matrices are multiplied: `Product` (plain) or a subclass, which spec.py chooses
    messages    TP collectives around the product (`TPCollectives`), or chunked with it (overlapped_linear.py)
    gradient    where a weight's gradient is accumulated (weight_gradient.py)

The spec chooses the parts: `ModuleSpec(module=Column, params={"product": ..., "in_pieces": ...})`.
Parameters, names and checkpoints are megatron-core's. Transformer Engine's layers are separate (te_spec.py).

megatron-core's multi-latent attention accepts only its exact classes as down projections
(multi_latent_attention.py:405-417, 450-462), so `PLAIN` multiplies by their weights (latent_attention.py).

Shapes: S sequence (S / TP per rank with SP), B micro-batch, M tokens, I inputs and O outputs of this rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.autograd.function import once_differentiable

from patch.distributed.async_collectives import (
    CommHandle,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from patch.distributed.tensor_group import TensorGroup
from patch.model.overlapped_linear import OverlappedColumn, OverlappedRow
from patch.model.weight_gradient import weight_gradient


class TPCollectives(NamedTuple):
    """TP collectives around a product; none by default."""

    group: Any = None
    """The TP group (a ProcessGroup), or None if both flags are False."""
    is_cut: bool = False
    """Whether the input is split along its first dimension over the group (SP)."""
    sums_gradient: bool = False
    """Whether the input's gradient is summed over the group."""

    def start_gather(self, part: torch.Tensor) -> tuple[torch.Tensor, CommHandle]:
        """Start an all-gather along the first dimension; the result is complete after the wait."""
        whole = part.new_empty(part.shape[0] * self.group.size(), *part.shape[1:])
        own = whole.chunk(self.group.size())[self.group.rank()].copy_(part)
        # As bytes, because not every communication library supports every dtype.
        return whole, start_all_gather(whole.view(torch.uint8), own.view(torch.uint8), self.group)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All-gather along the first dimension."""
        whole, gathering = self.start_gather(part)
        gathering.wait()
        return whole

    def all_reduce_max(self, numbers: torch.Tensor) -> None:
        """Replace each element by its maximum over the ranks."""
        start_all_reduce(numbers, self.group, dist.ReduceOp.MAX).wait()

    def start_sum(self, gradient: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, CommHandle | None]:
        """Start the sum of the input's gradient; the handle is None if the gradient is final."""
        if self.is_cut:
            own = gradient.new_empty(shape)
            return own, start_reduce_scatter(gradient.view(-1, *shape[1:]), own, self.group)
        gradient = gradient.view(shape)
        return gradient, start_all_reduce(gradient, self.group) if self.sums_gradient else None


NO_COLLECTIVES = TPCollectives()


class Product:
    """The plain product; the weight's gradient is accumulated in the main gradient. Subclasses replace parts.

    The products are input @ weight.T, and in backward gradient @ weight and gradient.T @ input.
    """

    adds_bias = False
    """Whether the product adds the bias itself, even where megatron-core returns the bias to the caller."""

    def of(self, weight: torch.nn.Parameter | None) -> Self:
        """Return the product of one layer; `weight` is None if each call passes the weight."""
        return self

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        messages: TPCollectives = NO_COLLECTIVES,
    ) -> torch.Tensor:
        """Multiply [S, B, I] by [O, I] transposed to [S, B, O]; with SP the input is [S / TP, B, I]."""
        output = _Linear.apply(input, weight, self, messages, torch.is_grad_enabled())
        return output if bias is None else output + bias

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor, messages: TPCollectives, *, keeps: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the output, and the tensors to save for the gradient of the weight (none unless `keeps`).

        The input is [S, B, I]; with SP [S / TP, B, I], which the product all-gathers as it needs. With SP,
        backward all-gathers the first saved tensor.
        """
        whole = messages.gather(input) if messages.is_cut else input
        return whole @ weight.t(), (input,) if keeps else ()

    def of_gradient(self, gradient: torch.Tensor, *, of_input: bool, of_weight: bool) -> Any:
        """Return the gradient of the output [M, O] in the form for the two methods below."""
        return gradient

    def input_gradient(self, gradient: Any, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input [M, I]."""
        return gradient @ weight

    def weight_gradient(
        self, weight: torch.Tensor, gradient: Any, kept: list[torch.Tensor], messages: TPCollectives
    ) -> torch.Tensor:
        """Return the gradient of the weight [O, I], or a stand-in.

        Args:
            weight: the parameter itself, not the copy that autograd saved.
            gradient: from `of_gradient`.
            kept: from `forward`; with SP the first tensor is all-gathered.
        """
        (whole,) = kept
        return weight_gradient(weight, gradient, whole.reshape(-1, whole.shape[-1]))


class _Linear(torch.autograd.Function):
    """A product with collectives, which overlap in backward as in megatron-core."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        product: Product,
        messages: TPCollectives,
        has_backward: bool,
    ) -> torch.Tensor:
        keeps = has_backward and ctx.needs_input_grad[1]
        output, kept = product.forward(input, weight, messages, keeps=keeps)
        if has_backward:
            ctx.product, ctx.messages, ctx.shape, ctx.weight = product, messages, input.shape, weight
            ctx.save_for_backward(weight, *kept)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        product: Product = ctx.product
        messages: TPCollectives = ctx.messages
        weight, *kept = ctx.saved_tensors
        needs_input, gathering, summing = ctx.needs_input_grad[0], None, None
        if kept and messages.is_cut:
            kept[0], gathering = messages.start_gather(kept[0])
        rows = gradient.reshape(-1, gradient.shape[-1])
        factors = product.of_gradient(rows, of_input=needs_input, of_weight=bool(kept))
        of_input = of_weight = None
        if needs_input:
            of_input, summing = messages.start_sum(product.input_gradient(factors, weight), ctx.shape)
        if kept:
            if gathering is not None:
                gathering.wait()
            of_weight = product.weight_gradient(ctx.weight, factors, kept, messages)
        if summing is not None:
            summing.wait()
        return of_input, of_weight, None, None, None


PLAIN = Product()


class _ParallelLinearBase:
    """Common base of Column and Row. With `in_pieces`, collectives are chunked with the plain product.

    megatron-core passes `bias` for all linear layers alike; `has_bias` adds one to this layer.
    """

    def __init__(
        self,
        *arguments: Any,
        product: Product = PLAIN,
        in_pieces: bool = False,
        has_bias: bool = False,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named | ({"bias": True} if has_bias else {}))
        assert product is PLAIN or not in_pieces
        self.product, self.in_pieces = product.of(self.weight), in_pieces  # type: ignore[attr-defined]
        if product.adds_bias:
            self.skip_bias_add = False

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        for name, child in self.named_children():  # type: ignore[attr-defined]
            state |= child.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return state

    def _forward_impl(self, **named: Any) -> torch.Tensor:
        messages = TPCollectives(named["tp_group"], named["sequence_parallel"], named["allreduce_dgrad"])
        return self.product(named["input"], named["weight"], named["bias"], messages)

    def _tensor_group(self) -> TensorGroup:
        return TensorGroup(self.tp_group, is_overlapped=self.config.tp_comm_overlap)  # type: ignore[attr-defined]


class Column(_ParallelLinearBase, ColumnParallelLinear):
    """ColumnParallelLinear with an exchangeable product."""

    def _forward_impl(self, **named: Any) -> torch.Tensor:
        if not self.in_pieces:
            return super()._forward_impl(**named)
        input, weight, bias = named["input"], named["weight"], named["bias"]
        return OverlappedColumn.apply(input, weight, bias, self._tensor_group(), named["sequence_parallel"])


class Row(_ParallelLinearBase, RowParallelLinear):
    """RowParallelLinear with an exchangeable product."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return [S, B, O], with SP [S / TP, B, O], and the bias if the caller adds it."""
        if self.product.adds_bias and self.tp_group.size() == 1:
            return self.product(input_, self.weight, self.bias), None
        if not self.in_pieces:
            return super().forward(input_)
        output = OverlappedRow.apply(input_, self.weight, self._tensor_group(), self.sequence_parallel)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None
