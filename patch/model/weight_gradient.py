"""The gradient of a linear layer's weight, added where the optimizer collects gradients.

Autograd rounds the product of each micro-batch to the weight's type; the optimizer then adds it up. If the
optimizer gives a weight a `main_grad_writer` (MainGradWriter), the product itself is added to the optimizer's
memory, without that rounding: on CUDA by the product's epilogue.

Shapes: M rows (tokens), O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable


class MainGradWriter(Protocol):
    """The attribute `main_grad_writer` of a weight, for one gradient after the other."""

    def open(self) -> tuple[torch.Tensor, bool]:
        """Where the gradient belongs now, in the shape of the weight; whether to overwrite what is there."""

    def stand_in(self) -> torch.Tensor:
        """A stand-in that backward returns for the gradient: zeros, which are not added to it."""


def weight_gradient(weight: torch.Tensor, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """The gradient that backward returns for a weight, or a stand-in if it is in its place already.

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


def add_gradient(weight: torch.Tensor, gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Add a gradient that is there, times a factor, where the weight's belongs; returns the stand-in for it.

    Args:
        weight: [O, I], with a `main_grad_writer`.
        gradient: [O, I] float32.
        factor: a float32 number.
    """
    writer: MainGradWriter = weight.main_grad_writer  # type: ignore[attr-defined]
    total, is_first = writer.open()
    torch.mul(gradient, factor, out=total) if is_first else total.addcmul_(gradient, factor)
    return writer.stand_in()


class RowsOfWeight(torch.autograd.Function):
    """Rows of a weight [V, H] by their numbers; the gradient is added where the optimizer collects it.

    By a Triton kernel: the gradient of the whole weight never exists.
    """

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, weight: torch.Tensor, is_part: bool) -> torch.Tensor:
        """Numbers [...] in; [..., H] out. Of a part of a weight some may be of other rows: zeros."""
        ctx.numbers, ctx.weight = numbers, weight
        if not is_part:
            return F.embedding(numbers, weight)
        is_own = (numbers >= 0) & (numbers < len(weight))
        ctx.numbers = torch.where(is_own, numbers, -1)
        return F.embedding(numbers * is_own, weight).mul_(is_own[..., None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        """The stand-in for the weight's gradient."""
        # Imported here, because only torch's CUDA builds come with Triton.
        from patch.model.kernels.fused import add_rows

        writer: MainGradWriter = ctx.weight.main_grad_writer
        total, is_first = writer.open()
        if is_first:
            total.zero_()
        add_rows(total, ctx.numbers.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        return None, writer.stand_in(), None


def weight_gradients(weights: Sequence[torch.Tensor], gradients: torch.Tensor) -> list[torch.Tensor]:
    """The gradients that backward returns for several weights, in the weights' dtype.

    Args:
        weights: of the same shape; see `weight_gradient`.
        gradients: [weights, O, I].
    """
    found, places, own = list(gradients), [], []
    for index, weight in enumerate(weights):
        writer: MainGradWriter | None = getattr(weight, "main_grad_writer", None)
        if writer is not None:
            places.append(writer.open())
            own.append(gradients[index])
            found[index] = writer.stand_in()
    whole = as_one([total for total, _ in places]) if len(places) == len(weights) else None
    if whole is not None and len({is_first for _, is_first in places}) == 1:
        places, own = [(whole, places[0][1])], [gradients]
    for (total, is_first), gradient in zip(places, own, strict=True):
        total.copy_(gradient) if is_first else total.add_(gradient)
    return found


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Contiguous tensors of one shape as a view [tensors, ...], if they lie at equal distances in one memory.

    Their beginnings are multiples of 16 bytes.
    """
    first, begins = tensors[0], [tensor.storage_offset() for tensor in tensors]
    step = begins[1] - begins[0] if len(begins) > 1 else first.numel()
    memory, unit = first.untyped_storage().data_ptr(), 16 // first.element_size()
    if (
        step < first.numel()
        or step % unit
        or first.data_ptr() % 16
        or begins != [begins[0] + index * step for index in range(len(begins))]
        or any(tensor.untyped_storage().data_ptr() != memory for tensor in tensors)
    ):
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


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
