"""Products of `--precision fp8`: the three products of a linear layer take fp8 operands.

Weights, inputs and outputs are bfloat16. Input and weight are cast to e4m3, the gradient of the output to
e5m2 (`--fp8-format hybrid`) or e4m3. Each tensor has one scale, computed from its current values (matrix.py).
On a TP rank it is the scale of the rank's shard. Only weights are not cast anew for each product.

Input with SP: ranks agree on the amax of the full input, each rank casts its own part, and fp8 values are
all-gathered.

Backward: a layer saves its input in fp8, half the size of bfloat16. If another operation keeps the input
anyway (attention its output) or recomputes it (AC=sel), the layer saves that bfloat16 input. With SP it saves
this rank's part, which backward all-gathers. The gradient of the weight is accumulated in the main gradient
(weight_gradient.py) or returned.

Weights: each weight is an operand along its rows in forward and along its columns in backward, in every
micro-batch and recomputation. While `StepWeights.unchanged` is open no weight changes, so each operand is
made once. Otherwise each product makes its own, so no writer of weights has to invalidate anything.
All-gathers of updated weights may be in flight when a step begins: a layer waits for its weight
(`patch.optimizer.buckets.param_buffer`) before it makes the operands.

With `--fp8-param-gather` the optimizer has cast the weight: the parameter has fp8 values, and its attribute
`scale_inv` is their inverse scale.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch

from patch.config.choices import Fp8Format
from patch.fp8 import Fp8Matrix, Fp8Operands
from patch.model.fp8.matrix import add_product, product, quantize, quantize_operands, transposed
from patch.model.linear import Product, TPCollectives
from patch.model.weight_gradient import MainGradWriter

_WIDE = torch.float8_e4m3fn
"""The dtype of inputs and weights."""
_GRADIENT = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


class StepWeights:
    """The shared state of a model's fp8 weights.

    With `keeps_weights` the operands are kept, 2 bytes per element of a weight. Otherwise only the scales
    are kept, so that each amax is computed once.
    """

    def __init__(
        self, form: Fp8Format = "hybrid", *, keeps_weights: bool = False, param_gather: bool = False
    ) -> None:
        self.form, self.keeps_weights, self.param_gather = form, keeps_weights, param_gather
        self._weights: list[Fp8Weight] = []
        self.is_open = False
        """Whether operands or scales that are made now are kept."""

    def new(self) -> Fp8Weight:
        """Return the state for the weight of one layer."""
        self._weights.append(Fp8Weight(self))
        return self._weights[-1]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which no weight changes: forwards and backwards of a step, or an evaluation."""
        self.is_open = True
        try:
            yield
        finally:
            self.is_open = False
            for weight in self._weights:
                weight.forget()


class Fp8Weight:
    """The weight [N, K] of a layer as an operand of its products; `step` decides what is kept."""

    def __init__(self, step: StepWeights) -> None:
        self._step = step
        self._gathered_scale: torch.Tensor | None = None
        """The inverse scale of a weight that is all-gathered in fp8; the optimizer writes it."""
        self.forget()

    def forget(self) -> None:
        """Drop everything that was kept, because the weight may change."""
        self._rows: Fp8Matrix | None = None
        self._columns: Fp8Matrix | None = None
        self._scale: torch.Tensor | None = None

    def rows(self, weight: torch.Tensor) -> Fp8Matrix:
        """Return the operand [N, K] of a product that sums along the rows."""
        if weight.dtype == _WIDE:
            # The tensor that autograd saves for backward may lack the attributes of the parameter.
            self._gathered_scale = weight.scale_inv  # type: ignore[attr-defined]
            return self._as_gathered(weight)
        if self._rows is not None:
            return self._rows
        made = quantize(weight, _WIDE, self._scale)
        if self._step.is_open:
            self._scale = made.scale_inv
            self._rows = made if self._step.keeps_weights else None
        return made

    def columns(self, weight: torch.Tensor) -> Fp8Matrix:
        """Return the operand [K, N] of a product that sums along the columns."""
        if self._columns is not None:
            return self._columns
        if weight.dtype == _WIDE:
            made = transposed(self._as_gathered(weight))
        elif self._rows is not None:
            made = transposed(self._rows)
        else:
            _, columns = quantize_operands(weight, _WIDE, rows=False, scale_inv=self._scale)
            assert columns is not None
            made = columns
        if self._step.is_open:
            self._columns = made if self._step.keeps_weights else None
        return made

    def _as_gathered(self, weight: torch.Tensor) -> Fp8Matrix:
        assert self._gathered_scale is not None, "forward comes first"
        return Fp8Matrix(weight.detach(), self._gathered_scale)


class Fp8Product(Product):
    """Products with fp8 operands.

    Forward sums along the rows of both operands, the input's gradient along the columns of the weight, and
    the weight's gradient along the columns of both operands. With `keeps_input` the bfloat16 input is saved,
    because another operation keeps or recomputes it anyway.
    """

    _weight: Fp8Weight

    def __init__(self, step: StepWeights, *, keeps_input: bool) -> None:
        self._step, self._keeps_input = step, keeps_input

    def of(self, weight: torch.nn.Parameter | None) -> Self:
        """Return the product of one layer, with its own operands of the weight."""
        if self._step.param_gather:  # the optimizer reads the attribute
            weight.gather_dtype = _WIDE  # type: ignore[union-attr]
        own = copy.copy(self)
        own._weight = self._step.new()
        return own

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor, messages: TPCollectives, *, keeps: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See Product. Saves the input's columns; with SP this rank's rows, from which backward makes
        columns.
        """
        matrix = input.reshape(-1, input.shape[-1])
        in_fp8 = keeps and not self._keeps_input
        if messages.is_cut:
            rows, columns = self._of_cut_input(matrix, messages, columns=in_fp8)
        else:
            rows, columns = quantize_operands(matrix, _WIDE, columns=in_fp8)
        assert rows is not None
        output = product(rows, self._weight.rows(weight), input.dtype, fast=True)
        return output.view(-1, *input.shape[1:-1], len(weight)), columns or ((input,) if keeps else ())

    def of_gradient(
        self, gradient: torch.Tensor, *, of_input: bool, of_weight: bool
    ) -> tuple[Fp8Operands, torch.dtype]:
        """Return the gradient of the output as operands, and the dtype of the results."""
        kind = _GRADIENT[self._step.form]
        made = quantize_operands(gradient, kind, rows=of_input, columns=of_weight)
        return made, gradient.dtype

    def input_gradient(self, gradient: tuple[Fp8Operands, torch.dtype], weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input [M, I]."""
        (rows, _), dtype = gradient
        assert rows is not None
        return product(rows, self._weight.columns(weight), dtype)

    def weight_gradient(
        self,
        weight: torch.Tensor,
        gradient: tuple[Fp8Operands, torch.dtype],
        kept: list[torch.Tensor],
        messages: TPCollectives,
    ) -> torch.Tensor:
        """Return the gradient of the weight [O, I], or a stand-in."""
        (_, columns), dtype = gradient
        of_input: Fp8Matrix | None
        if self._keeps_input:
            (whole,) = kept
            _, of_input = quantize_operands(whole.reshape(-1, whole.shape[-1]), _WIDE, rows=False)
        else:
            of_input = Fp8Matrix(*kept)
            of_input = transposed(of_input) if messages.is_cut else of_input
        assert columns is not None and of_input is not None
        writer: MainGradWriter | None = getattr(weight, "main_grad_writer", None)
        if writer is None:
            return product(columns, of_input, dtype)
        total, is_first = writer.open()
        add_product(total, columns, of_input, dtype, overwrite=is_first)
        return writer.dummy_wgrad()

    def _of_cut_input(
        self, part: torch.Tensor, messages: TPCollectives, *, columns: bool
    ) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
        """Return the rows of all ranks, and this rank's rows for backward, with the scale of the full one."""
        own = quantize(part, _WIDE, agree=messages.all_reduce_max)
        return own._replace(values=messages.gather(own.values)), own if columns else None
