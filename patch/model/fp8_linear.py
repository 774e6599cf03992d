"""Linear layers of `--precision fp8`: upstream's, whose three products take 8-bit factors.

Weights, inputs and outputs are bfloat16; input and weight are rounded to e4m3, the output's gradient to e5m2
(`--fp8-format hybrid`) or e4m3. Each product scales its factors anew (`fp8_matrix.py`): tensor-wise, or with
a scale for each row of what it sums over. On a TP rank these are the scales of its own part.

For backward a layer keeps its input in 8 bits, half of what bfloat16 takes; where something else keeps the
input anyway (attention its result) or brings it back (AC=sel), it keeps that one. With SP a rank keeps its
own part, and backward gathers 8-bit values.

Row-wise, weight and input are rounded twice, once for each dimension that is summed over. On CUDA the search
for the largest number, the cast and the transposition are kernels of torch, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.autograd.function import once_differentiable

from patch.config.schema import Fp8
from patch.model.fp8_matrix import Fp8Matrix, product, quantize

_INPUT = torch.float8_e4m3fn
_GRADIENT = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Fp8Product:
    """How a linear layer computes its products; calling it is the layer without bias.

    The factors of input @ weight.T are by_row(input) and by_row(weight), those of backward's two products
    by_row(gradient) and by_column(weight), by_column(gradient) and by_column(input).
    """

    fp8: Fp8
    keeps_input: bool
    """Keep the input as it came: something else keeps it too, or brings it back before backward needs it."""
    is_gathered: bool = False
    """The input is cut along its first dimension over the group (SP)."""
    sums_gradient: bool = False
    """The input's gradient is a sum over the group."""
    group: dist.ProcessGroup | None = None
    """The TP group; not needed without either of the two."""

    def __call__(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[S, B, K] times [N, K] transposed: [S, B, N]; if gathered, [S / TP, B, K] to [S, B, N]."""
        return _Linear.apply(input, weight, self, torch.is_grad_enabled())

    def by_row(self, matrix: torch.Tensor, dtype: torch.dtype) -> Fp8Matrix:
        """A factor of a product that sums along its rows."""
        return quantize(matrix, dtype, 1 if self.fp8.recipe == "rowwise" else None)

    def by_column(self, matrix: torch.Tensor, dtype: torch.dtype, rows: Fp8Matrix | None = None) -> Fp8Matrix:
        """A factor of a product that sums along its columns; tensor-wise it is `rows`, if these are given."""
        if self.fp8.recipe == "rowwise":
            return quantize(matrix, dtype, 0)
        return rows or quantize(matrix, dtype, None)


class _Linear(torch.autograd.Function):
    """The autograd function of an Fp8Product."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: torch.Tensor, how: Fp8Product, has_backward: bool
    ) -> torch.Tensor:
        whole = input
        if how.is_gathered:
            whole, gathering = _start_gather(input, how.group)
            gathering.wait()
        matrix = whole.reshape(-1, whole.shape[-1])
        rows = how.by_row(matrix, _INPUT)
        output = product(rows, how.by_row(weight, _INPUT), input.dtype, fast=True)
        if has_backward:
            ctx.how, ctx.shape, ctx.dtype = how, input.shape, input.dtype
            kept = _kept(how, input, matrix, rows) if ctx.needs_input_grad[1] else ()
            ctx.save_for_backward(weight, *kept)
        return output.view(*whole.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None, None]:
        how: Fp8Product = ctx.how
        weight, *kept = ctx.saved_tensors
        gathering = None
        if kept and how.is_gathered:
            kept[0], gathering = _start_gather(kept[0], how.group)
        matrix = gradient.reshape(-1, gradient.shape[-1])
        rows = how.by_row(matrix, _GRADIENT[how.fp8.format])
        input_gradient = product(rows, how.by_column(weight, _INPUT).transposed(), ctx.dtype)
        # Communication of the input's gradient is overlapped with the product of the weight's, as upstream's.
        input_gradient, reducing = _start_reduction(how, input_gradient, ctx.shape)
        weight_gradient = None
        if kept:
            if gathering is not None:
                gathering.wait()
            columns = how.by_column(matrix, rows.values.dtype, rows)
            inputs = _columns_of_input(how, kept)
            weight_gradient = product(columns.transposed(), inputs.transposed(), weight.dtype)
        if reducing is not None:
            reducing.wait()
        return input_gradient, weight_gradient, None, None


def _kept(
    how: Fp8Product, input: torch.Tensor, matrix: torch.Tensor, rows: Fp8Matrix
) -> tuple[torch.Tensor, ...]:
    """What a forward keeps for the weight's gradient: this rank's input, or that in 8 bits, and scales."""
    if how.keeps_input:
        return (input,)
    values, scale_inv = how.by_column(matrix, _INPUT, rows)
    if how.is_gathered:
        own = values.chunk(dist.get_world_size(how.group))[dist.get_rank(how.group)]
        values = own.clone()  # otherwise the whole would be kept
    return values, scale_inv


def _columns_of_input(how: Fp8Product, kept: list[torch.Tensor]) -> Fp8Matrix:
    """The input as a factor of the weight's gradient, from what was kept and gathered."""
    if how.keeps_input:
        (whole,) = kept
        return how.by_column(whole.reshape(-1, whole.shape[-1]), _INPUT)
    return Fp8Matrix(*kept)


def _start_gather(part: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, dist.Work]:
    """All ranks' parts of a tensor along its first dimension; they are there when the work is done."""
    whole = part.new_empty(part.shape[0] * dist.get_world_size(group), *part.shape[1:])
    # As bytes, because communication libraries do not know 8-bit floats everywhere.
    return whole, dist.all_gather_into_tensor(
        whole.view(torch.uint8), part.contiguous().view(torch.uint8), group=group, async_op=True
    )


def _start_reduction(
    how: Fp8Product, gradient: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, dist.Work | None]:
    """The gradient of this rank's input, of that shape, final when the work is done; None: it is final."""
    if how.is_gathered:
        own = gradient.new_empty(shape)
        parts = gradient.view(-1, *shape[1:])
        return own, dist.reduce_scatter_tensor(own, parts, group=how.group, async_op=True)
    gradient = gradient.view(shape)
    if how.sums_gradient:
        return gradient, dist.all_reduce(gradient, group=how.group, async_op=True)
    return gradient, None


class _Fp8Layer:
    """What both layers below have in common; upstream's classes call `_forward_impl` for the product."""

    fp8: Fp8
    keeps_input: bool

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None,
        **unused: Any,
    ) -> torch.Tensor:
        linear = Fp8Product(self.fp8, self.keeps_input, sequence_parallel, allreduce_dgrad, tp_group)
        output = linear(input, weight)
        return output if bias is None else output + bias


class Fp8ColumnParallelLinear(_Fp8Layer, ColumnParallelLinear):
    """Upstream's layer, whose weight is cut over TP along its rows, with 8-bit products."""


class Fp8RowParallelLinear(_Fp8Layer, RowParallelLinear):
    """Upstream's layer, whose weight is cut over TP along its columns, with 8-bit products."""


def use_fp8(layer: TransformerLayer, fp8: Fp8, *, brings_inputs_back: bool) -> None:
    """Give the four linear layers of a finished transformer layer 8-bit products and upstream's messages.

    The spec cannot do it: upstream builds one of the four from a class, without arguments of its own. The
    classes have no parameters of their own, so changing the class of the finished module is enough.

    Args:
        layer: upstream's layer with upstream's linear layers or those of overlapped_linear.py.
        fp8: format and scales.
        brings_inputs_back: backward recomputes the norms and the MLP's activation (AC=sel).
    """
    attention, mlp = layer.self_attention, layer.mlp
    for linear in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
        is_column = isinstance(linear, ColumnParallelLinear)
        assert is_column or isinstance(linear, RowParallelLinear), type(linear)
        linear.__class__ = Fp8ColumnParallelLinear if is_column else Fp8RowParallelLinear
        linear.fp8 = fp8
        # Attention keeps its result, which is the projection's input.
        linear.keeps_input = brings_inputs_back or linear is attention.linear_proj
