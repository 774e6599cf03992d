"""RMSNorm in Triton: one kernel forward, and one backward that also adds the gradient of the residual.

torch's backward reads hidden states and gradient twice, and autograd adds the gradient of the residual in
another kernel. Results are torch's, with another order of sums. Each program holds a row. With
TRITON_INTERPRET=1 before the import, Triton's interpreter runs the kernels on the CPU.

Shapes: T tokens, H hidden.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

_PROGRAMS = 512
"""Programs of backward. Each sums the gradient of the weight over its rows."""


class NormAndResidual(torch.autograd.Function):
    """RMSNorm of hidden states, and the same hidden states for the residual sum."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        is_zero_centered: bool,
        amax: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `hidden` [..., H] normalized, and `hidden`.

        Args:
            is_zero_centered: whether rows are multiplied by 1 + weight.
            amax: a float32 zero [], which becomes the largest absolute value of the result; or None.
        """
        # Detached, because the caller attaches the second result to `hidden`: no cycle of references.
        whole, width = hidden.detach().contiguous(), len(weight)
        normed = torch.empty_like(whole)
        factors = weight.new_empty(whole.numel() // width, dtype=torch.float32)
        if len(factors):
            bits = None if amax is None else amax.view(torch.int32)
            _norm[(len(factors),)](
                whole, weight, normed, factors, bits, width, eps, is_zero_centered, **_sizes(width)
            )
        ctx.save_for_backward(whole, weight, factors)
        ctx.is_zero_centered = is_zero_centered
        return normed, hidden.detach()

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, of_normed: torch.Tensor, of_residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        """Return the gradients of hidden states and weight."""
        hidden, weight, factors = ctx.saved_tensors
        width, programs = len(weight), min(_PROGRAMS, len(factors))
        of_hidden, of_weight = torch.empty_like(hidden), factors.new_empty(programs, width)
        if programs:
            _norm_backward[(programs,)](
                of_normed.contiguous(), of_residual.contiguous(), hidden, weight, factors, of_hidden,
                of_weight, len(factors), width, ctx.is_zero_centered, **_sizes(width),
            )  # fmt: skip
        return of_hidden, of_weight.sum(0).to(weight.dtype), None, None, None


def _sizes(width: int) -> dict[str, int]:
    block = triton.next_power_of_2(width)
    return {"block": block, "num_warps": min(max(block // 512, 4), 32)}


@triton.jit
def _factors_of(weight: tl.tensor, i: tl.tensor, width: tl.tensor, is_centered: tl.constexpr) -> tl.tensor:
    factor = tl.load(weight + i, i < width, other=0).to(tl.float32)
    return factor + 1.0 if is_centered else factor


@triton.jit
def _norm(
    hidden: tl.tensor, weight: tl.tensor, normed: tl.tensor, factors: tl.tensor, amax: tl.tensor | None,
    width: tl.tensor, eps: tl.tensor, is_centered: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    x = tl.load(hidden + row * width + i, i < width, other=0).to(tl.float32)
    factor = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=0) / width + eps))
    y = (x * factor * _factors_of(weight, i, width, is_centered)).to(normed.dtype.element_ty)
    tl.store(normed + row * width + i, y, i < width)
    tl.store(factors + row, factor)
    if amax is not None:
        bits = y.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # ordered as the values, NaN above
        tl.atomic_max(amax, tl.max(bits, axis=0), sem="relaxed")


@triton.jit
def _norm_backward(
    of_normed: tl.tensor, of_residual: tl.tensor, hidden: tl.tensor, weight: tl.tensor, factors: tl.tensor,
    of_hidden: tl.tensor, of_weight: tl.tensor, rows: tl.tensor, width: tl.tensor,
    is_centered: tl.constexpr, block: tl.constexpr,
) -> None:  # fmt: skip
    i = tl.arange(0, block)
    inside, w = i < width, _factors_of(weight, i, width, is_centered)
    total = tl.full((block,), 0.0, tl.float32)
    row = tl.program_id(0).to(tl.int64)
    while row < rows:
        factor, begin = tl.load(factors + row), row * width
        x = tl.load(hidden + begin + i, inside, other=0).to(tl.float32) * factor
        gradient = tl.load(of_normed + begin + i, inside, other=0).to(tl.float32)
        total += gradient * x
        gradient *= w
        out = (gradient - x * (tl.sum(gradient * x, axis=0) / width)) * factor
        out = out.to(of_hidden.dtype.element_ty).to(tl.float32)  # rounded before the sum, as by autograd
        out += tl.load(of_residual + begin + i, inside, other=0).to(tl.float32)
        tl.store(of_hidden + begin + i, out, inside)
        row += tl.num_programs(0)
    tl.store(of_weight + tl.program_id(0) * width + i, total, inside)
