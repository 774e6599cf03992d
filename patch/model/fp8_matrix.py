"""Matrices of 8-bit floats with their scales, and the product of two of them. No autograd, no communication.

Scales are current: made from the numbers they scale, by the device, without a wait of the host. They are
powers of two, so scaling is exact: what a number becomes does not depend on its neighbours unless it is so
small beside the largest of them that it loses bits or vanishes. A scale of half a tensor (TP) therefore gives
the values of the whole one's. A number that is not finite makes its tensor (row-wise: its row) NaN.

In a product the contracted dimension is the last one of both factors, as cuBLAS wants 8-bit factors.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch.nn.functional import ScalingType, pad, scaled_mm

from patch.compat.torch_internals import has_kernel

MULTIPLE = 16
"""CUDA's 8-bit products need a contracted dimension and columns that are multiples of this."""

_SMALLEST_AMAX = 2.0**-100
"""Below it the scale stays, so that the scale of zeros, and its inverse, are normal float32 numbers."""
_SIGN_AND_EXPONENT = -(2**23)
"""The bits of a float32 that are left if its mantissa is cleared."""


_IS_ON_CPU = has_kernel("aten::_scaled_mm_v2", "CPU")
"""torch 2.13 has 8-bit products on the CPU, 2.11 only on GPUs."""


class Fp8Matrix(NamedTuple):
    """A matrix whose numbers are `values * scale_inv`."""

    values: torch.Tensor
    """[M, N] float8."""
    scale_inv: torch.Tensor
    """float32 []: one for all; [M, 1]: one for each row; or [1, N]: one for each column."""

    def transposed(self) -> Fp8Matrix:
        """[N, M], M padded with zeros to a multiple of MULTIPLE; zeros add nothing to a sum over M.

        The scale, of all or of each column, becomes one of all or of each row.
        """
        # As bytes, for which every device has these operations; a zero is a zero byte.
        turned, missing = self.values.view(torch.uint8).t(), -self.values.shape[0] % MULTIPLE
        turned = pad(turned, (0, missing)) if missing else turned.contiguous()
        values = turned.view(self.values.dtype)
        return Fp8Matrix(values, self.scale_inv.view(-1, 1) if self.scale_inv.dim() else self.scale_inv)


def quantize(matrix: torch.Tensor, dtype: torch.dtype, shared_dim: int | None) -> Fp8Matrix:
    """A matrix in 8 bits, each number rounded to the nearest.

    Args:
        matrix: [M, N], float32 or bfloat16.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        shared_dim: the dimension along which numbers share a scale; None: all of the matrix.
    """
    amax = torch.linalg.vector_norm(matrix, math.inf, dim=shared_dim, keepdim=shared_dim is not None).float()
    ratio = torch.finfo(dtype).max / amax.clamp_min(_SMALLEST_AMAX)
    scale = ratio.view(torch.int32).bitwise_and(_SIGN_AND_EXPONENT).view(torch.float32)
    # The cast to 8 bits may turn an infinite number into the largest one; NaN - NaN and inf - inf are NaN.
    scale_inv = scale.reciprocal() + (amax - amax)
    # The scale is exact in every floating type, so the matrix is not widened.
    return Fp8Matrix((matrix * scale.to(matrix.dtype)).to(dtype), scale_inv)


def product(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """a @ b.T: [M, K] and [N, K] to [M, N], summed in float32.

    Args:
        a: the first factor; e5m2 may be this one only.
        b: the second factor, with scales of the same kind.
        dtype: of the result; CUDA's row-wise kernel has bfloat16 only.
        fast: fewer bits in the tensor cores' sums (CUDA), for a forward.
    """
    if not (a.values.is_cuda or _IS_ON_CPU):
        return (a.values.float() @ b.values.float().t() * a.scale_inv * b.scale_inv.t()).to(dtype)
    recipe = ScalingType.RowWise if a.scale_inv.dim() else ScalingType.TensorWise
    return scaled_mm(
        a.values, b.values.t(), a.scale_inv, recipe, b.scale_inv.t(), recipe,
        output_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip
