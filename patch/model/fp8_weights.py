"""Weights in 8 bits, made once for all micro-batches of a step.

A weight is a factor of two products, along its rows in forward and along its columns in backward, in every
micro-batch, and again where a layer is recomputed. While `StepWeights.unchanged` is open nobody changes a
weight, so a factor that was made is that of all later products. Outside of it each product makes its own:
nothing has to know who writes weights, and by which alias.

The gathers of updated weights that still travel when a step begins change nothing: a layer that gets its
weight waits for it (`patch.optimizer.param_buffer`), and the factors are made from what it got.

With `--fp8-param-gather` the optimizer has rounded the weight already: the parameter is its values in 8 bits,
and its attribute `scale_inv` their scale.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from patch.eight_bits import Fp8Matrix
from patch.model.fp8_matrix import factors, transposed

_DTYPE = torch.float8_e4m3fn


class StepWeights:
    """What the 8-bit weights of a model have in common.

    Args:
        rowwise: a scale for each row of what a product sums over, instead of one for the tensor.
        keeps_values: keep the factors, 2 bytes for each number of a weight; otherwise only their scales, so
            that the largest numbers are searched once.
    """

    def __init__(self, *, rowwise: bool, keeps_values: bool) -> None:
        self.rowwise, self.keeps_values = rowwise, keeps_values
        self._weights: list[Fp8Weight] = []
        self.is_open = False
        """Whether what is made now is kept."""

    def new(self) -> Fp8Weight:
        """For the weight of a layer."""
        self._weights.append(Fp8Weight(self))
        return self._weights[-1]

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context in which nobody changes a weight: forwards and backwards of a step, or an evaluation."""
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
        self._row_scales: torch.Tensor | None = None
        self._column_scales: torch.Tensor | None = None

    def rows(self, weight: torch.Tensor) -> Fp8Matrix:
        """The factor of a product that sums along its rows."""
        if weight.dtype == _DTYPE:
            # What autograd saves of a weight for backward may be without its attributes.
            self._gathered_scale = weight.scale_inv  # type: ignore[attr-defined]
            return self._as_gathered(weight)
        if self._rows is not None:
            return self._rows
        known = self._row_scales, None
        made, _ = factors(weight, _DTYPE, rowwise=self._step.rowwise, columns=False, scale_inv=known)
        assert made is not None
        if self._step.is_open:
            self._row_scales = made.scale_inv
            self._rows = made if self._step.keeps_values else None
        return made

    def columns(self, weight: torch.Tensor) -> Fp8Matrix:
        """The factor of a product that sums along its columns, [K, N]."""
        if self._columns is not None:
            return self._columns
        if weight.dtype == _DTYPE:
            made = transposed(self._as_gathered(weight))
        elif self._rows is not None and not self._step.rowwise:
            made = transposed(self._rows)
        else:
            known = (None, self._column_scales) if self._step.rowwise else (self._row_scales, None)
            _, columns = factors(weight, _DTYPE, rowwise=self._step.rowwise, rows=False, scale_inv=known)
            assert columns is not None
            made = columns
        if self._step.is_open:
            if self._step.rowwise:
                self._column_scales = made.scale_inv
            self._columns = made if self._step.keeps_values else None
        return made

    def _as_gathered(self, weight: torch.Tensor) -> Fp8Matrix:
        assert self._gathered_scale is not None, "forward comes first"
        return Fp8Matrix(weight.detach(), self._gathered_scale)
