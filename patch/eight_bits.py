"""Numbers in 8 bits: the scale that goes with the largest of them, and the cast.

A scale is a power of two, so scaling is exact. Both the layers' products and the optimizer's gathers make
8-bit weights by these two functions, which is why they get the same bits.
"""

from __future__ import annotations

import torch

SMALLEST_AMAX = 2.0**-100
"""Below it the scale stays, so that the scale of zeros, and its inverse, are normal float32 numbers."""
SIGN_AND_EXPONENT = -(2**23)
"""The bits of a float32 that are left if its mantissa is cleared."""


def scale_inv_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What 8-bit numbers are multiplied by: the inverse of their scale, NaN if a number was not finite.

    Args:
        amax: float32, the largest absolute numbers; any shape.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    """
    ratio = torch.finfo(dtype).max / amax.clamp_min(SMALLEST_AMAX)
    scale = ratio.view(torch.int32).bitwise_and(SIGN_AND_EXPONENT).view(torch.float32)
    # The cast to 8 bits may turn an infinite number into the largest one; NaN - NaN and inf - inf are NaN.
    return scale.reciprocal() + (amax - amax)


def cast(values: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers in 8 bits, each rounded to the nearest.

    Args:
        values: float32 or bfloat16.
        scale_inv: from `scale_inv_of`; one, or of a shape that fits.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
    """
    # The scale is exact in every floating type, so the numbers are not widened.
    return (values * scale_inv.reciprocal().to(values.dtype)).to(dtype)
