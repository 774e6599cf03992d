"""Numbers in 8 bits: matrices of them, the scale that goes with the largest one, and the cast.

A scale is a power of two, so scaling is exact. Both the layers' products and the optimizer's gathers make
8-bit weights by these two functions, which is why they get the same bits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

MULTIPLE = 16
"""CUDA's 8-bit products need a contracted dimension and columns that are multiples of this."""
SMALLEST_AMAX = 2.0**-100
"""Below it the scale stays, so that the scale of zeros, and its inverse, are normal float32 numbers."""
SIGN_AND_EXPONENT = -(2**23)
"""The bits of a float32 that are left if its mantissa is cleared."""


class Fp8Matrix(NamedTuple):
    """A matrix whose numbers are `values * scale_inv`."""

    values: torch.Tensor
    """[M, N] float8, contiguous."""
    scale_inv: torch.Tensor
    """float32 []."""


class Factors(NamedTuple):
    """A matrix [M, N] as a factor of products; what was not asked for is None."""

    rows: Fp8Matrix | None
    """[M, N], of a product that sums along its rows."""
    columns: Fp8Matrix | None
    """[N, padded(M)], of one that sums along its columns."""


def padded(length: int) -> int:
    """The dimension that a product contracts, at least `length`; not 0, which is no product for a library."""
    return max(1, -(-length // MULTIPLE)) * MULTIPLE


def largest_of(matrix: torch.Tensor) -> torch.Tensor:
    """The largest absolute number, float32 []; NaN is larger than any."""
    if not matrix.numel():  # torch knows no largest number of none
        return torch.zeros((), device=matrix.device)
    return torch.linalg.vector_norm(matrix, math.inf).float()


def note_amax(written: torch.Tensor, amax: torch.Tensor) -> None:
    """Note the largest absolute number of a tensor with its memory, for a cast that follows.

    The note goes with the memory, which autograd hands on under other objects, and ends with it. A copy has
    none, and an operation of torch that changes a number makes it void, but for those on `.data` or on a
    storage, which are not counted. Tensors of `torch.inference_mode`, whose changes go unseen, get none.

    Args:
        written: contiguous, just written by the kernel that found the number.
        amax: float32 [].
    """
    if not written.is_inference():
        written.untyped_storage().amax = _numbers_of(written), amax  # type: ignore[attr-defined]


def noted_amax(matrix: torch.Tensor) -> torch.Tensor | None:
    """The noted amax of these numbers, in any shape, if they have not been changed since."""
    numbers, amax = getattr(matrix.untyped_storage(), "amax", (None, None))
    return amax if amax is not None and numbers == _numbers_of(matrix) else None


def _numbers_of(matrix: torch.Tensor) -> tuple[object, ...]:
    """Which numbers of a memory, and how often they have been changed."""
    where = matrix.storage_offset(), matrix.numel(), matrix.is_contiguous(), matrix.dtype
    return *where, matrix._version


def scale_inv_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of the scale of 8-bit numbers; NaN if a number was not finite.

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
