"""A product as in the linear layers: its backward adds the gradient of the weight where it belongs."""

from typing import Any

import torch

from patch.model.weight_gradient import weight_gradient


class AddingLinear(torch.autograd.Function):
    """A product whose backward calls `weight_gradient`."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input)
        ctx.weight = weight
        return input @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        of_input = gradient @ ctx.weight
        if not ctx.needs_input_grad[1]:
            return of_input, None
        return of_input, weight_gradient(ctx.weight, gradient, ctx.saved_tensors[0])
