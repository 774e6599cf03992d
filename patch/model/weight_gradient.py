"""The gradient of a linear layer's weight, added where the optimizer collects gradients.

Autograd rounds the product of each micro-batch to the weight's type; the optimizer then adds it up. If the
optimizer gives a weight a `main_grad_writer` (MainGradWriter), the product itself is added to the optimizer's
memory, without that rounding: on CUDA by the product's epilogue.

Shapes: M rows (tokens), O outputs, I inputs.
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch


class MainGradWriter(Protocol):
    """The attribute `main_grad_writer` of a weight, for one gradient after the other."""

    def open(self) -> tuple[torch.Tensor, bool]:
        """Where the gradient belongs now, in the shape of the weight; whether to overwrite what is there."""

    def stand_in(self) -> torch.Tensor:
        """What backward returns instead of the gradient: zeros, which are not added to it."""


def weight_gradient(weight: torch.Tensor, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """What backward returns for a weight: the gradient, or a stand-in for one that is in its place already.

    Args:
        weight: [O, I], the object that the layer got in forward, which autograd's copies are not.
        gradient: [M, O] of the output.
        input: [M, I].
    """
    writer: MainGradWriter | None = getattr(weight, "main_grad_writer", None)
    if writer is None:
        return gradient.t() @ input
    total, is_first = writer.open()
    add_product(total, gradient.t(), input, overwrite=is_first)
    return writer.stand_in()


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, overwrite: bool) -> None:
    """total = total + a @ b; a product of 16-bit factors is not rounded before it is added to float32.

    Args:
        total: [O, I], contiguous.
        a: [O, M].
        b: [M, I], of the type of `a`.
        overwrite: whether total = a @ b, whatever is there.
    """
    beta = 0 if overwrite else 1
    if total.dtype == b.dtype:
        torch.addmm(total, a, b, beta=beta, out=total)
    elif has_epilogue(total.device, b.dtype, total.dtype):
        torch.addmm(total, a, b, beta=beta, out_dtype=total.dtype, out=total)
    elif total.dtype == torch.float32 and not total.is_cuda:
        torch.addmm(total, a.float(), b.float(), beta=beta, out=total)
    elif overwrite:
        total.copy_(a @ b)
    else:
        total.add_(a @ b)


@cache
def has_epilogue(device: torch.device, factor: torch.dtype, total: torch.dtype) -> bool:
    """Whether torch's product can add to this other type: on CUDA from 16 bits to float32."""
    sums = torch.zeros(16, 16, dtype=total, device=device)
    factors = torch.zeros(16, 16, dtype=factor, device=device)
    try:
        torch.addmm(sums, factors, factors, out_dtype=total, out=sums)
    except torch.OutOfMemoryError:  # says nothing of the kernel
        raise
    except RuntimeError:  # NotImplementedError, where there is no such kernel, is one
        return False
    return True
