"""Linear layers of `--precision fp8`: upstream's, whose three products take 8-bit factors.

Weights, inputs and outputs are bfloat16; input and weight are rounded to e4m3, the output's gradient to e5m2
(`--fp8-format hybrid`) or e4m3. Scales are made anew from what they scale (`fp8_matrix.py`): tensor-wise, or
with a scale for each row of what a product sums over. On a TP rank these are the scales of its own part.
A weight is rounded once a step (`fp8_weights.py`), everything else for each product.

For backward a layer keeps its input in 8 bits, half of what bfloat16 takes; where something else keeps the
input anyway (attention its result) or brings it back (AC=sel), it keeps that one. With SP a rank keeps its
own part, and backward gathers 8-bit values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from patch.config.execution import Fp8
from patch.distributed.async_collectives import (
    Pending,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from patch.eight_bits import Factors, Fp8Matrix
from patch.model.fp8_matrix import factors, product, quantize, transposed
from patch.model.fp8_weights import Fp8Weight, StepWeights

_INPUT = torch.float8_e4m3fn
_GRADIENT = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Fp8Product:
    """How a linear layer computes its products; calling it is the layer without bias.

    The products are input @ weight.T, and in backward gradient @ weight and gradient.T @ input: the first
    sums along the rows of both factors, the second along the columns of the weight, the third along the
    columns of both.
    """

    fp8: Fp8
    keeps_input: bool
    """Keep the input as it came: something else keeps it too, or brings it back before backward needs it."""
    weight: Fp8Weight
    """The weight's factors."""
    is_gathered: bool = False
    """The input is cut along its first dimension over the group (SP)."""
    sums_gradient: bool = False
    """The input's gradient is a sum over the group."""
    group: ProcessGroup | None = None
    """The TP group; not needed without either of the two."""

    def __call__(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[S, B, K] times [N, K] transposed: [S, B, N]; if gathered, [S / TP, B, K] to [S, B, N]."""
        return _Linear.apply(input, weight, self, torch.is_grad_enabled())

    @property
    def rowwise(self) -> bool:
        """A scale for each row of what a product sums over."""
        return self.fp8.recipe == "rowwise"

    def of_input(self, matrix: torch.Tensor, *, rows: bool, columns: bool) -> Factors:
        """Input [M, K] as factors."""
        return factors(matrix, _INPUT, rowwise=self.rowwise, rows=rows, columns=columns)

    def of_gradient(self, matrix: torch.Tensor, *, rows: bool, columns: bool) -> Factors:
        """The output's gradient [M, N] as factors."""
        dtype = _GRADIENT[self.fp8.format]
        return factors(matrix, dtype, rowwise=self.rowwise, rows=rows, columns=columns)


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
        keeps = has_backward and ctx.needs_input_grad[1]
        keeps_columns = keeps and not how.keeps_input
        rows, columns = how.of_input(matrix, rows=True, columns=keeps_columns and not how.is_gathered)
        assert rows is not None
        output = product(rows, how.weight.rows(weight), input.dtype, fast=True)
        if has_backward:
            ctx.how, ctx.shape, ctx.dtype = how, input.shape, input.dtype
            kept: tuple[torch.Tensor, ...] = (input,) if keeps and how.keeps_input else ()
            if keeps_columns:
                kept = columns or _own_part(how, matrix, rows)
            ctx.save_for_backward(weight, *kept)
        return output.view(*whole.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None]:
        how: Fp8Product = ctx.how
        weight, *kept = ctx.saved_tensors
        gathering = None
        if kept and how.is_gathered:
            kept[0], gathering = _start_gather(kept[0], how.group)
        matrix = gradient.reshape(-1, gradient.shape[-1])
        rows, columns = how.of_gradient(matrix, rows=ctx.needs_input_grad[0], columns=bool(kept))
        input_gradient, reducing = None, None
        if rows is not None:
            input_gradient = product(rows, how.weight.columns(weight), ctx.dtype)
            # Communication is overlapped with the product of the weight's gradient, as upstream's.
            input_gradient, reducing = _start_reduction(how, input_gradient, ctx.shape)
        weight_gradient = None
        if columns is not None:
            if gathering is not None:
                gathering.wait()
            weight_gradient = product(columns, _input_columns(how, kept), ctx.dtype)
        if reducing is not None:
            reducing.wait()
        return input_gradient, weight_gradient, None, None


def _own_part(how: Fp8Product, matrix: torch.Tensor, rows: Fp8Matrix) -> Fp8Matrix:
    """What a forward keeps of the gathered input: this rank's rows, with the scales of the whole one."""
    assert how.group is not None
    values, scale_inv = quantize(matrix, _INPUT, 0) if how.rowwise else rows
    own = values.chunk(how.group.size())[how.group.rank()]
    return Fp8Matrix(own.clone(), scale_inv)  # otherwise the whole would be kept


def _input_columns(how: Fp8Product, kept: list[torch.Tensor]) -> Fp8Matrix:
    """The input as a factor of the weight's gradient, from what was kept and gathered."""
    if not how.keeps_input:
        of_columns = Fp8Matrix(*kept)
        return transposed(of_columns) if how.is_gathered else of_columns
    (whole,) = kept
    _, columns = how.of_input(whole.reshape(-1, whole.shape[-1]), rows=False, columns=True)
    assert columns is not None
    return columns


def _start_gather(part: torch.Tensor, group: ProcessGroup | None) -> tuple[torch.Tensor, Pending]:
    """All ranks' parts of a tensor along its first dimension; they are there when it has been waited for."""
    assert group is not None
    whole = part.new_empty(part.shape[0] * group.size(), *part.shape[1:])
    own = whole.chunk(group.size())[group.rank()].copy_(part)
    # As bytes, because communication libraries do not know 8-bit floats everywhere.
    return whole, start_all_gather(whole.view(torch.uint8), own.view(torch.uint8), group)


def _start_reduction(
    how: Fp8Product, gradient: torch.Tensor, shape: torch.Size
) -> tuple[torch.Tensor, Pending | None]:
    """The gradient of this rank's input, of that shape, final after the wait; None: it is final."""
    if how.is_gathered:
        assert how.group is not None
        own = gradient.new_empty(shape)
        return own, start_reduce_scatter(gradient.view(-1, *shape[1:]), own, how.group)
    gradient = gradient.view(shape)
    if how.sums_gradient:
        assert how.group is not None
        return gradient, start_all_reduce(gradient, how.group)
    return gradient, None


class _Fp8Layer:
    """What both layers below have in common; upstream's classes call `_forward_impl` for the product."""

    fp8: Fp8
    fp8_weight: Fp8Weight
    keeps_input: bool

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        *,
        bias: torch.Tensor | None,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: ProcessGroup | None,
        **unused: Any,
    ) -> torch.Tensor:
        linear = Fp8Product(
            self.fp8, self.keeps_input, self.fp8_weight, sequence_parallel, allreduce_dgrad, tp_group
        )
        output = linear(input, weight)
        return output if bias is None else output + bias


class Fp8ColumnParallelLinear(_Fp8Layer, ColumnParallelLinear):
    """Upstream's layer, whose weight is cut over TP along its rows, with 8-bit products."""


class Fp8RowParallelLinear(_Fp8Layer, RowParallelLinear):
    """Upstream's layer, whose weight is cut over TP along its columns, with 8-bit products."""


def use_fp8(
    layer: TransformerLayer, fp8: Fp8, step_weights: StepWeights, *, brings_inputs_back: bool
) -> None:
    """Give the four linear layers of a finished transformer layer 8-bit products and upstream's messages.

    The spec cannot do it: upstream builds one of the four from a class, without arguments of its own. The
    classes have no parameters of their own, so changing the class of the finished module is enough.

    Args:
        layer: upstream's layer with upstream's linear layers or those of overlapped_linear.py.
        fp8: format and scales.
        step_weights: keeps the layers' 8-bit weights during a step.
        brings_inputs_back: backward recomputes the norms and the MLP's activation (AC=sel).
    """
    attention, mlp = layer.self_attention, layer.mlp
    for linear in (attention.linear_qkv, attention.linear_proj, mlp.linear_fc1, mlp.linear_fc2):
        is_column = isinstance(linear, ColumnParallelLinear)
        assert is_column or isinstance(linear, RowParallelLinear), type(linear)
        linear.__class__ = Fp8ColumnParallelLinear if is_column else Fp8RowParallelLinear
        linear.fp8, linear.fp8_weight = fp8, step_weights.new()
        if fp8.param_gather:  # read by the optimizer
            linear.weight.gather_dtype = _INPUT
        # Attention keeps its result, which is the projection's input.
        linear.keeps_input = brings_inputs_back or linear is attention.linear_proj
