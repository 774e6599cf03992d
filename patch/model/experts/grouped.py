"""Experts on Hopper: one grouped product over all experts of a rank for each of their two matrices.

torch's grouped product (the same call in 2.11 and 2.13) reads the end of each expert's rows on the device, so
the host does not wait. It takes the matrices of all experts as one tensor. In the optimizer's flat buffers
the matrices of a layer, and their gradients, lie at equal distances, the last expert first. So experts are in
reverse order here, and one tensor is a view. Without such a layout (no optimizer, or padding between experts
in a bucket) forward and backward each copy the matrices of the layer for a moment.

Products round as single products do. Weight gradients are rounded to bf16 and then added to the optimizer's
float32, except where the host knows the rows of each of a few experts. There single products are accumulated
in float32 (weight_gradient.py), which reads and writes fewer bytes.

Shapes: T rows of all E experts, H hidden, F width of an expert (2 F: gate and up).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import grouped_mm

from patch.model.mlp import Activation, is_fused_swiglu
from patch.model.weight_gradient import as_one, weight_gradient, weight_gradients

MOST_SINGLE = 16
"""Experts of a rank whose weight gradients may be single products."""
SIZES = 8
"""Widths must be multiples of it, because bf16 rows must begin at multiples of 16 bytes."""


class GroupedExperts(torch.autograd.Function):
    """(activate(tokens @ first.T) * weight) @ second.T for each expert.

    `apply` takes tokens [T, H] sorted by expert and their weights [T]. `ends` [E], int32 on the device, is
    the row after each expert's last row. `sizes` are the rows of each expert on the host, if the weight
    gradients are to be single products. `matrices` are all first matrices [2 F, H], then all second [H, F].
    """

    @staticmethod
    def forward(
        ctx: Any,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        ends: torch.Tensor,
        sizes: list[int] | None,
        activate: Activation,
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        """Return [T, H]."""
        first, second = _stacked(matrices)
        hidden = grouped_mm(tokens, first.mT, offs=ends)
        active = weighted_activation(hidden, weights, activate)
        ctx.sizes, ctx.activate, ctx.matrices = sizes, activate, matrices
        ctx.save_for_backward(tokens, weights, ends, hidden, *matrices)
        return grouped_mm(active, second.mT, offs=ends)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of tokens, weights and matrices."""
        tokens, weights, ends, hidden, *matrices = ctx.saved_tensors
        first, second = _stacked(matrices)
        gradient, of_weights = gradient.contiguous(), torch.empty_like(weights)
        of_active = grouped_mm(gradient, second, offs=ends)
        of_hidden, active = activation_backward(hidden, weights, of_active, ctx.activate, of_weights)
        of_matrices: list[torch.Tensor | None] = []
        for of_output, input in ((of_hidden, tokens), (gradient, active)):
            half = slice(len(of_matrices), len(of_matrices) + len(ends))
            if not any(ctx.needs_input_grad[5:][half]):
                of_matrices += [None] * len(ends)
            elif ctx.sizes is not None:
                rows = of_output.split(ctx.sizes), input.split(ctx.sizes)
                of_matrices += map(weight_gradient, ctx.matrices[half], *rows)
            else:
                # Hopper's kernel writes zeros for an expert without rows; Blackwell's leaves old memory
                # (pytorch/pytorch#172439).
                product = grouped_mm(of_output.t(), input, offs=ends)
                of_matrices += weight_gradients(ctx.matrices[half], product)
        return grouped_mm(of_hidden, first, offs=ends), of_weights, None, None, None, *of_matrices


def weighted_activation(hidden: torch.Tensor, weights: torch.Tensor, activate: Activation) -> torch.Tensor:
    """Return activate(hidden) * weight, [T, F], from [T, 2 F] and [T]."""
    if is_fused_swiglu(activate):
        from patch.model.kernels import fused  # only CUDA builds of torch have Triton

        return fused.weighted_swiglu(hidden, weights)
    return activate(hidden).mul_(weights.unsqueeze(-1))


def activation_backward(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    of_active: torch.Tensor,
    activate: Activation,
    of_weights: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of hidden, and the output of `weighted_activation`, for rows of any experts.

    `hidden` is [T, 2 F]. `of_active` [T, F] is the gradient of the output; it is overwritten. `of_weights`
    [T] receives the gradient of the weights.
    """
    if is_fused_swiglu(activate):
        from patch.model.kernels import fused

        return fused.weighted_swiglu_backward(of_active, hidden, weights, of_weights)
    weight = weights.unsqueeze(-1)
    with torch.enable_grad():
        gate_up = hidden.detach().requires_grad_()
        active = activate(gate_up)
    torch.sum(of_active * active.detach().to(weight.dtype), -1, out=of_weights)
    (of_hidden,) = torch.autograd.grad(active, gate_up, of_active.mul_(weight))
    return of_hidden, active.detach().mul_(weight)


def _stacked(matrices: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return all first matrices [E, 2 F, H] and all second [E, H, F], as views where possible."""
    number = len(matrices) // 2
    halves = matrices[:number], matrices[number:]
    found = ((as_one(half), half) for half in halves)
    return [torch.stack(list(half)) if whole is None else whole for whole, half in found]
