"""fp8 matrices, their scales, and the cast to fp8.

A scale is a power of two, so scaling is exact. The layers' products and the optimizer's all-gather both make
fp8 weights by `scale_inv_of` and `cast`, so they get the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

MULTIPLE = 16
"""The contracted dimension and the columns of CUDA's fp8 products must be multiples of this."""
SMALLEST_AMAX = 2.0**-100
"""Lower bound of the amax in a scale: the scale of zeros, and its inverse, are normal float32 numbers."""
SIGN_AND_EXPONENT = -(2**23)
"""Mask that clears the mantissa of a float32."""


class Fp8Matrix(NamedTuple):
    """A matrix with the values `values * scale_inv`."""

    values: torch.Tensor
    """[M, N] float8, contiguous."""
    scale_inv: torch.Tensor
    """float32 []."""


class Fp8Operands(NamedTuple):
    """A matrix [M, N] as an operand of products; an operand that was not requested is None."""

    rows: Fp8Matrix | None
    """[M, N], for a product that sums along the rows."""
    columns: Fp8Matrix | None
    """[N, padded(M)], for a product that sums along the columns."""


def padded(length: int) -> int:
    """Return `length` rounded up to a multiple of MULTIPLE; at least MULTIPLE, because libraries refuse 0."""
    return max(1, -(-length // MULTIPLE)) * MULTIPLE


def scale_inv_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the inverse scale of fp8 values; NaN if a value was not finite.

    Args:
        amax: float32, of any shape.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    """
    ratio = torch.finfo(dtype).max / amax.clamp_min(SMALLEST_AMAX)
    scale = ratio.view(torch.int32).bitwise_and(SIGN_AND_EXPONENT).view(torch.float32)
    # The cast to fp8 may turn infinity into the largest value; NaN - NaN and inf - inf are NaN.
    return scale.reciprocal() + (amax - amax)


def cast(values: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values in fp8, each rounded to the nearest.

    Args:
        values: float32 or bfloat16.
        scale_inv: from `scale_inv_of`; [] or a shape that broadcasts.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    """
    # The scale is exact in every floating dtype, so the values are not cast to float32.
    return (values * scale_inv.reciprocal().to(values.dtype)).to(dtype)
