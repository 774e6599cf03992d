"""The gradient of a linear layer's weight, accumulated in the optimizer's main gradient.

Autograd rounds the product of each micro-batch to the weight's dtype, before the optimizer accumulates it. If
a weight has a `main_grad_writer` (MainGradWriter), the product is added to the main gradient without that
rounding; on CUDA by the epilogue of the GEMM.

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
    """The attribute `main_grad_writer` of a weight, for one gradient after another."""

    def open(self) -> tuple[torch.Tensor, bool]:
        """Return the main gradient in the shape of the weight, and whether to overwrite its values."""

    def dummy_wgrad(self) -> torch.Tensor:
        """Return a stand-in for the gradient: zeros, which the optimizer does not add."""


def weight_gradient(weight: torch.Tensor, gradient: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a weight for autograd, or a stand-in if it was added to the main gradient.

    `weight` [O, I] is the parameter itself, not the copy that autograd saved. `gradient` [M, O] is of the
    output.
    """
    writer: MainGradWriter | None = getattr(weight, "main_grad_writer", None)
    if writer is None:
        return gradient.t() @ input
    total, is_first = writer.open()
    add_product(total, gradient.t(), input, overwrite=is_first)
    return writer.dummy_wgrad()


def add_gradient(weight: torch.Tensor, gradient: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Add gradient [O, I] (float32) times factor to the main gradient, and return the stand-in."""
    writer: MainGradWriter = weight.main_grad_writer  # type: ignore[attr-defined]
    total, is_first = writer.open()
    torch.mul(gradient, factor, out=total) if is_first else total.addcmul_(gradient, factor)
    return writer.dummy_wgrad()


class EmbeddingLookup(torch.autograd.Function):
    """Lookup of rows of a weight [V, H]; a Triton kernel adds the gradient to the main gradient."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, weight: torch.Tensor, is_part: bool) -> torch.Tensor:
        """Look up numbers [...]; [..., H] out. If `is_part`, numbers outside of the shard give zeros."""
        ctx.numbers, ctx.weight = numbers, weight
        if not is_part:
            return F.embedding(numbers, weight)
        is_own = (numbers >= 0) & (numbers < len(weight))
        ctx.numbers = torch.where(is_own, numbers, -1)
        return F.embedding(numbers * is_own, weight).mul_(is_own[..., None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        """Return the stand-in for the weight's gradient."""
        from patch.model.kernels.fused import add_rows  # only CUDA builds of torch have Triton

        writer: MainGradWriter = ctx.weight.main_grad_writer
        total, is_first = writer.open()
        if is_first:
            total.zero_()
        add_rows(total, ctx.numbers.flatten(), gradient.reshape(-1, gradient.shape[-1]))
        return None, writer.dummy_wgrad(), None


def weight_gradients(weights: Sequence[torch.Tensor], gradients: torch.Tensor) -> list[torch.Tensor]:
    """Return the gradients of several weights for autograd, from `gradients` [weights, O, I]."""
    found, places, own = list(gradients), [], []
    for index, weight in enumerate(weights):
        writer: MainGradWriter | None = getattr(weight, "main_grad_writer", None)
        if writer is not None:
            places.append(writer.open())
            own.append(gradients[index])
            found[index] = writer.dummy_wgrad()
    whole = as_one([total for total, _ in places]) if len(places) == len(weights) else None
    if whole is not None and len({is_first for _, is_first in places}) == 1:
        places, own = [(whole, places[0][1])], [gradients]
    for (total, is_first), gradient in zip(places, own, strict=True):
        total.copy_(gradient) if is_first else total.add_(gradient)
    return found


def as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return contiguous tensors of one shape as a view [tensors, ...], or None if no view is possible.

    A view needs one storage, equal distances, and starts at multiples of 16 bytes.
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
    """Add a [O, M] @ b [M, I] to a contiguous `total`, or write it if `overwrite`.

    Products of 16-bit operands are added to a float32 total without rounding.
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
    """Return whether torch's GEMM can add to this other dtype: on CUDA from 16 bits to float32."""
    sums = torch.zeros(16, 16, dtype=total, device=device)
    factors = torch.zeros(16, 16, dtype=factor, device=device)
    try:
        torch.addmm(sums, factors, factors, out_dtype=total, out=sums)
    except torch.OutOfMemoryError:  # does not mean that there is no kernel
        raise
    except RuntimeError:  # includes NotImplementedError, if there is no kernel
        return False
    return True
