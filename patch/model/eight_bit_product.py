"""Products of `--precision fp8`: linear layers' three products take 8-bit factors.

Weights, inputs and outputs are bfloat16; input and weight are rounded to e4m3, the output's gradient to e5m2
(`--fp8-format hybrid`) or e4m3. A tensor has one scale, made anew from its numbers (`fp8_matrix.py`). On a
TP rank it is the scale of the rank's own part.
Everything but weights is rounded for each product.

With SP a rank rounds its own part of the input with the scale of the whole, for which ranks agree on the
largest number first, and 8-bit values are gathered.

For backward a layer keeps its input in 8 bits, half of what bfloat16 takes; where something else keeps the
input anyway (attention its result) or brings it back (AC=sel), it keeps that one. With SP it is this rank's
part, which backward gathers as it was kept. The weight's gradient is added where the optimizer wants it
(`weight_gradient.py`), or returned.

A weight is a factor of two products, along its rows in forward and along its columns in backward, in every
micro-batch, and again where a layer is recomputed. While `StepWeights.unchanged` is open no weight
changes, so a factor that was made is that of all later products. Outside of it each product makes its own:
nothing has to know who writes weights, and by which alias.

The gathers of updated weights that still travel when a step begins change nothing: a layer that gets its
weight waits for it (`patch.optimizer.param_buffer`), and the factors are made from what it got.

With `--fp8-param-gather` the optimizer has rounded the weight already: the parameter is its values in 8 bits,
and its attribute `scale_inv` their scale.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch

from patch.config.execution import Execution, Fp8
from patch.eight_bits import Factors, Fp8Matrix
from patch.model.fp8_matrix import add_product, factors, product, quantize, transposed
from patch.model.linear import Messages, Product
from patch.model.weight_gradient import MainGradWriter

_WIDE = torch.float8_e4m3fn
"""The dtype of inputs and weights."""
_GRADIENT = {"hybrid": torch.float8_e5m2, "e4m3": torch.float8_e4m3fn}


class StepWeights:
    """The shared state of a model's 8-bit weights.

    Args:
        fp8: with `keeps_weights` the factors are kept, 2 bytes for each number of a weight; otherwise only
            their scales, so that the largest numbers are searched once.
    """

    def __init__(self, fp8: Fp8) -> None:
        self.fp8 = fp8
        self._weights: list[Fp8Weight] = []
        self.is_open = False
        """Whether what is made now is kept."""

    @classmethod
    def of(cls, execution: Execution) -> StepWeights | None:
        """The 8-bit weights of a model with 8-bit products; None: its products have the weights' dtype."""
        return cls(execution.fp8) if execution.precision == "fp8" else None

    def new(self) -> Fp8Weight:
        """For the weight of a layer."""
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
    """The weight [N, K] of a layer as a factor of its products.

    Args:
        step: decides what is kept, and how long.
    """

    def __init__(self, step: StepWeights) -> None:
        self._step = step
        self._gathered_scale: torch.Tensor | None = None
        """The scale of a weight that is gathered in 8 bits, where the optimizer writes its scale."""
        self.forget()

    def forget(self) -> None:
        """The weight may change from here on."""
        self._rows: Fp8Matrix | None = None
        self._columns: Fp8Matrix | None = None
        self._scale: torch.Tensor | None = None

    def rows(self, weight: torch.Tensor) -> Fp8Matrix:
        """The factor of a product that sums along its rows."""
        if weight.dtype == _WIDE:
            # What autograd saves of a weight for backward may be without its attributes.
            self._gathered_scale = weight.scale_inv  # type: ignore[attr-defined]
            return self._as_gathered(weight)
        if self._rows is not None:
            return self._rows
        made = quantize(weight, _WIDE, self._scale)
        if self._step.is_open:
            self._scale = made.scale_inv
            self._rows = made if self._step.fp8.keeps_weights else None
        return made

    def columns(self, weight: torch.Tensor) -> Fp8Matrix:
        """The factor of a product that sums along its columns, [K, N]."""
        if self._columns is not None:
            return self._columns
        if weight.dtype == _WIDE:
            made = transposed(self._as_gathered(weight))
        elif self._rows is not None:
            made = transposed(self._rows)
        else:
            _, columns = factors(weight, _WIDE, rows=False, scale_inv=self._scale)
            assert columns is not None
            made = columns
        if self._step.is_open:
            self._columns = made if self._step.fp8.keeps_weights else None
        return made

    def _as_gathered(self, weight: torch.Tensor) -> Fp8Matrix:
        assert self._gathered_scale is not None, "forward comes first"
        return Fp8Matrix(weight.detach(), self._gathered_scale)


class EightBits(Product):
    """The products of 8-bit factors.

    The first sums along the rows of both factors, the one for the input's gradient along the columns of the
    weight, the one for the weight's gradient along the columns of both.

    Args:
        step: format, scales, and what is kept of weights.
        keeps_input: keep the input as it came: something else keeps it too, or brings it back before backward
            needs it.
    """

    _weight: Fp8Weight

    def __init__(self, step: StepWeights, *, keeps_input: bool) -> None:
        self._step, self._keeps_input = step, keeps_input

    def of(self, weight: torch.nn.Parameter | None) -> Self:
        """The product of one layer, with its own factors of the weight."""
        if self._step.fp8.param_gather:  # read by the optimizer
            weight.gather_dtype = _WIDE  # type: ignore[union-attr]
        own = copy.copy(self)
        own._weight = self._step.new()
        return own

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor, messages: Messages, *, keeps: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See Product; columns of the input are kept, or this rank's rows, of which backward makes them."""
        matrix = input.reshape(-1, input.shape[-1])
        in_8_bits = keeps and not self._keeps_input
        if messages.is_cut:
            rows, columns = self._of_cut_input(matrix, messages, columns=in_8_bits)
        else:
            rows, columns = self._of_input(matrix, rows=True, columns=in_8_bits)
        assert rows is not None
        output = product(rows, self._weight.rows(weight), input.dtype, fast=True)
        return output.view(-1, *input.shape[1:-1], len(weight)), columns or ((input,) if keeps else ())

    def of_gradient(
        self, gradient: torch.Tensor, *, of_input: bool, of_weight: bool
    ) -> tuple[Factors, torch.dtype]:
        """The output's gradient as factors, and the type of results."""
        kind = _GRADIENT[self._step.fp8.format]
        made = factors(gradient, kind, rows=of_input, columns=of_weight)
        return made, gradient.dtype

    def input_gradient(self, gradient: tuple[Factors, torch.dtype], weight: torch.Tensor) -> torch.Tensor:
        """[M, I]."""
        (rows, _), dtype = gradient
        assert rows is not None
        return product(rows, self._weight.columns(weight), dtype)

    def weight_gradient(
        self,
        weight: torch.Tensor,
        gradient: tuple[Factors, torch.dtype],
        kept: list[torch.Tensor],
        messages: Messages,
    ) -> torch.Tensor:
        """[O, I], or what stands for it."""
        (_, columns), dtype = gradient
        of_input: Fp8Matrix | None
        if self._keeps_input:
            (whole,) = kept
            _, of_input = self._of_input(whole.reshape(-1, whole.shape[-1]), rows=False, columns=True)
        else:
            of_input = Fp8Matrix(*kept)
            of_input = transposed(of_input) if messages.is_cut else of_input
        assert columns is not None and of_input is not None
        writer: MainGradWriter | None = getattr(weight, "main_grad_writer", None)
        if writer is None:
            return product(columns, of_input, dtype)
        total, is_first = writer.open()
        add_product(total, columns, of_input, dtype, overwrite=is_first)
        return writer.stand_in()

    def _of_input(self, matrix: torch.Tensor, *, rows: bool, columns: bool) -> Factors:
        return factors(matrix, _WIDE, rows=rows, columns=columns)

    def _of_cut_input(
        self, part: torch.Tensor, messages: Messages, *, columns: bool
    ) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
        """The rows of all ranks, and for backward those of this rank, with the scale of the whole."""
        own = quantize(part, _WIDE, agree=messages.raise_to_largest)
        return own._replace(values=messages.gather(own.values)), own if columns else None
