"""The linear layers: upstream's, cut over tensor parallelism (TP) by columns or rows, made of parts.

    product     how matrices are multiplied: `Product` (plain), EightBits (eight_bit_product.py), FourBits
                (four_bit_product.py), BatchFirst and its like (hf_order.py)
    messages    around the product, as upstream's (`Messages`), or in pieces of it (overlapped_linear.py)
    sink        where a weight's gradient goes: weight_gradient.py

The spec chooses them: `ModuleSpec(module=Column, params={"product": ..., "in_pieces": ...})`. Parameters,
names and checkpoints are upstream's. Transformer Engine's layers stay its own (te_spec.py).

Where upstream builds a layer itself `give_product` serves the finished layer: the output layer. The
down projections of its multi-latent attention, of which it takes exact classes of its own only
(multi_latent_attention.py:405-417, 450-462), give their weights to `PLAIN` (latent_attention.py).

Shapes: S sequence (with SP a rank has S / TP of it), B micro-batch, M tokens, I inputs and O outputs of this
rank.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch.autograd.function import once_differentiable

from patch.distributed.async_collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from patch.distributed.tensor_group import TensorGroup
from patch.model.overlapped_linear import OverlappedColumn, OverlappedRow
from patch.model.weight_gradient import weight_gradient


class Messages(NamedTuple):
    """Upstream's messages around a product; none by default."""

    group: Any = None
    """The TP group (a ProcessGroup); not needed without either of the two."""
    is_cut: bool = False
    """The input is cut along its first dimension over the group (SP)."""
    sums_gradient: bool = False
    """The input's gradient is a sum over the group."""

    def start_gather(self, part: torch.Tensor) -> tuple[torch.Tensor, Pending]:
        """All ranks' parts of a tensor along its first dimension; they are there after the wait."""
        whole = part.new_empty(part.shape[0] * self.group.size(), *part.shape[1:])
        own = whole.chunk(self.group.size())[self.group.rank()].copy_(part)
        # As bytes, because communication libraries do not know 8-bit floats everywhere.
        return whole, start_all_gather(whole.view(torch.uint8), own.view(torch.uint8), self.group)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """All ranks' parts of a tensor along its first dimension."""
        whole, gathering = self.start_gather(part)
        gathering.wait()
        return whole

    def raise_to_largest(self, numbers: torch.Tensor) -> None:
        """Replace each number by the largest of all ranks' in its place."""
        start_all_reduce(numbers, self.group, dist.ReduceOp.MAX).wait()

    def start_sum(self, gradient: torch.Tensor, shape: torch.Size) -> tuple[torch.Tensor, Pending | None]:
        """The gradient of this rank's input, of that shape, final after the wait; None: it is final."""
        if self.is_cut:
            own = gradient.new_empty(shape)
            return own, start_reduce_scatter(gradient.view(-1, *shape[1:]), own, self.group)
        gradient = gradient.view(shape)
        return gradient, start_all_reduce(gradient, self.group) if self.sums_gradient else None


NO_MESSAGES = Messages()


class Product:
    """The plain product, whose weight gradient is added where the optimizer wants it; others replace parts.

    The products are input @ weight.T, and in backward gradient @ weight and gradient.T @ input.
    """

    adds_bias = False
    """Whether it adds the bias, in one operation, also where upstream leaves that to what follows."""

    def of(self, weight: torch.nn.Parameter | None) -> Self:
        """The product of one layer. None: the weight comes with each call."""
        return self

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        messages: Messages = NO_MESSAGES,
    ) -> torch.Tensor:
        """[S, B, I] times [O, I] transposed: [S, B, O]; if cut, [S / TP, B, I] to [S, B, O]."""
        output = _Linear.apply(input, weight, self, messages, torch.is_grad_enabled())
        return output if bias is None else output + bias

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor, messages: Messages, *, keeps: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """The output, and what is kept for the weight's gradient.

        Args:
            input: [S, B, I]; if cut, [S / TP, B, I], of which the product gathers what it needs.
            weight: [O, I].
            messages: if the input is cut, backward gathers the first of what is kept.
            keeps: whether the weight gets a gradient.
        """
        whole = messages.gather(input) if messages.is_cut else input
        return whole @ weight.t(), (input,) if keeps else ()

    def of_gradient(self, gradient: torch.Tensor, *, of_input: bool, of_weight: bool) -> Any:
        """The output's gradient [M, O], as the two methods below take it; which of them will be called."""
        return gradient

    def input_gradient(self, gradient: Any, weight: torch.Tensor) -> torch.Tensor:
        """[M, I]."""
        return gradient @ weight

    def weight_gradient(
        self, weight: torch.Tensor, gradient: Any, kept: list[torch.Tensor], messages: Messages
    ) -> torch.Tensor:
        """[O, I], or what stands for it.

        Args:
            weight: the object that the layer got in forward, which autograd's copies are not.
            gradient: what `of_gradient` made.
            kept: what `forward` kept; if the input is cut, the first of it is gathered.
            messages: those around the product.
        """
        (whole,) = kept
        return weight_gradient(weight, gradient, whole.reshape(-1, whole.shape[-1]))


class _Linear(torch.autograd.Function):
    """A product with messages around it, which overlap in backward with the products that upstream's do."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        product: Product,
        messages: Messages,
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
        messages: Messages = ctx.messages
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


class _OfParts:
    """Common base of both layers below; upstream's classes call `_forward_impl` for the product.

    They may have `adapters` (adapters.py), whose entries in a checkpoint stand beside the layer's own.

    Args:
        product: see the module.
        in_pieces: whether messages travel in pieces of the product, which is the plain one then.
        arguments, named: those of upstream's class.
    """

    def __init__(
        self, *arguments: Any, product: Product = PLAIN, in_pieces: bool = False, **named: Any
    ) -> None:
        super().__init__(*arguments, **named)
        assert product is PLAIN or not in_pieces
        self.product, self.in_pieces = product.of(self.weight), in_pieces  # type: ignore[attr-defined]
        if product.adds_bias:
            self.skip_bias_add = False

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Upstream's, which takes all but the layer's own weight for uncut."""
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)  # type: ignore[misc]
        adapters = getattr(self, "adapters", None)
        if adapters is not None:
            state |= adapters.sharded_state_dict(f"{prefix}adapters.", sharded_offsets, metadata)
        return state

    def _forward_impl(self, **named: Any) -> torch.Tensor:
        return _multiply(self.product, **named)

    def _tensor_group(self) -> TensorGroup:
        return TensorGroup(self.tp_group, is_overlapped=self.config.tp_comm_overlap)  # type: ignore[attr-defined]


class Column(_OfParts, ColumnParallelLinear):
    """Upstream's layer whose weight is cut over TP along its rows."""

    def _forward_impl(self, **named: Any) -> torch.Tensor:
        if not self.in_pieces:
            return super()._forward_impl(**named)
        input, weight, bias = named["input"], named["weight"], named["bias"]
        return OverlappedColumn.apply(input, weight, bias, self._tensor_group(), named["sequence_parallel"])


class Row(_OfParts, RowParallelLinear):
    """Upstream's layer whose weight is cut over TP along its columns."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[S, B, I] in; [S, B, O], with SP [S / TP, B, O], out, and the bias if the caller adds it."""
        if self.product.adds_bias and self.tp_group.size() == 1:
            return self.product(input_, self.weight, self.bias), None
        if not self.in_pieces:
            return super().forward(input_)
        output = OverlappedRow.apply(input_, self.weight, self._tensor_group(), self.sequence_parallel)
        if self.skip_bias_add or self.bias is None:
            return output, self.bias
        return output + self.bias, None


def give_product(layer: ColumnParallelLinear | RowParallelLinear, product: Product) -> None:
    """Let a finished layer of upstream's own class compute its product so, with upstream's messages.

    An instance's `_forward_impl` precedes its class's, and upstream's `forward` calls it.
    """
    layer._forward_impl = partial(_multiply, product.of(layer.weight))


def _multiply(
    product: Product,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Any,
    **unused: Any,
) -> torch.Tensor:
    """Upstream's call of `_forward_impl`."""
    return product(input, weight, bias, Messages(tp_group, sequence_parallel, allreduce_dgrad))
