"""Matrices of 8-bit floats with their scales, and the product of two of them. No autograd, no communication.

Scales are current: made from the numbers they scale, by the device, without a wait of the host. They are
powers of two, so scaling is exact: what a number becomes does not depend on its neighbours unless it is so
small beside the largest of them that it loses bits or vanishes. A scale of half a tensor (TP) therefore gives
the values of the whole one's. A number that is not finite makes its tensor NaN.

In a product the contracted dimension is the last one of both factors, as cuBLAS wants 8-bit factors.

The functions here are the plain form, of torch's own operations; on CUDA the kernels of fp8_kernels.py do the
same, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch.nn.functional import ScalingType, pad, scaled_mm

from patch.compat import cublaslt
from patch.compat.torch_internals import has_kernel
from patch.eight_bits import Factors, Fp8Matrix, cast, largest_of, noted_amax, padded, scale_inv_of

_IS_ON_CPU = has_kernel("aten::_scaled_mm_v2", "CPU")
"""torch 2.13 has 8-bit products on the CPU, 2.11 only on GPUs."""


def transposed(matrix: Fp8Matrix) -> Fp8Matrix:
    """A matrix [M, N] as [N, padded(M)], with zeros, which add nothing to a sum over M."""
    values, scale_inv = matrix
    if values.is_cuda:
        return Fp8Matrix(_kernels().transposed(values), scale_inv)
    # As bytes, for which every device has these operations; a zero is a zero byte.
    across = values.view(torch.uint8).t()
    missing = padded(len(values)) - len(values)
    across = pad(across, (0, missing)) if missing else across.contiguous()
    return Fp8Matrix(across.view(values.dtype), scale_inv)


def _kernels() -> ModuleType:
    # Imported here, because only torch's CUDA builds come with Triton.
    from patch.model import fp8_kernels

    return fp8_kernels


def quantize(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    scale_inv: torch.Tensor | None = None,
    agree: Callable[[torch.Tensor], None] | None = None,
) -> Fp8Matrix:
    """A matrix in 8 bits, each number rounded to the nearest.

    Args:
        matrix: [M, N], float32 or bfloat16.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scale_inv: that of an earlier call, if the matrix is the same; it need not be searched again.
        agree: raises the largest number, which it gets as bits (int32), to that of a matrix of which this
            is a part. None: it is whole. Of bits, because libraries may lose a NaN among floats.
    """
    if matrix.is_cuda:
        return _kernels().quantize(matrix, dtype, scale_inv, agree)
    if scale_inv is None:
        amax = noted_amax(matrix) if agree is None else None
        amax = largest_of(matrix) if amax is None else amax
        if agree is not None:
            agree(amax.view(torch.int32))
        scale_inv = scale_inv_of(amax, dtype)
    return Fp8Matrix(cast(matrix, scale_inv, dtype).contiguous(), scale_inv)


def factors(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = True,
    scale_inv: torch.Tensor | None = None,
) -> Factors:
    """A matrix as factors of products that sum along its rows, along its columns, or both.

    Args:
        matrix: [M, N], float32 or bfloat16.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rows: the first is needed.
        columns: the second is needed.
        scale_inv: that of an earlier call, if the matrix is the same.
    """
    if matrix.is_cuda:
        return _kernels().factors(matrix, dtype, rows=rows, columns=columns, scale_inv=scale_inv)
    both = quantize(matrix, dtype, scale_inv)
    return Factors(both if rows else None, transposed(both) if columns else None)


def product(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """a @ b.T: [M, K] and [N, K] to [M, N], summed in float32.

    Args:
        a: the first factor; e5m2 may be this one only.
        b: the second factor.
        dtype: of the result.
        fast: fewer bits in the tensor cores' sums (CUDA), for a forward.
    """
    if not len(a.values):
        return a.values.new_empty(0, len(b.values), dtype=dtype)
    if not (a.values.is_cuda or _IS_ON_CPU):
        return (a.values.float() @ b.values.float().t() * a.scale_inv * b.scale_inv).to(dtype)
    recipe = ScalingType.TensorWise
    return scaled_mm(
        a.values, b.values.t(), a.scale_inv, recipe, b.scale_inv, recipe,
        output_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip


def add_product(
    total: torch.Tensor, a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, overwrite: bool
) -> None:
    """total = total + a @ b.T, which is not rounded before, but where cuBLASLt refuses.

    Args:
        total: [M, N], contiguous.
        a, b: see `product`.
        dtype: to which CUDA rounds otherwise.
        overwrite: whether total = a @ b.T, whatever is there.
    """
    if not total.is_cuda:
        dtype = total.dtype
    elif total.dtype == torch.float32 and not cublaslt.obstacle(total.device, a.values.dtype):
        cublaslt.add_product(total, a, b, overwrite=overwrite)
        return
    found = product(a, b, dtype)
    total.copy_(found) if overwrite else total.add_(found)
