"""fp8 matrices with their scales, and the product of two of them. No autograd, no communication.

Scaling is current: the device computes each scale from the values, and the host does not wait. Scales are
powers of two, so scaling is exact. The fp8 value of an element depends on the other elements only if it loses
bits or underflows beside a much larger amax. So the scale of a TP shard gives the same values as the scale of
the full tensor. A value that is not finite makes the whole tensor NaN.

In a product the contracted dimension is the last dimension of both operands, as cuBLAS requires for fp8.

On CUDA, kernels.py computes the same bits as the torch operations here.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch.nn.functional import ScalingType, pad, scaled_mm

from patch.amax import largest_of, noted_amax
from patch.compat import cublaslt
from patch.compat.torch_internals import has_kernel
from patch.fp8 import Fp8Matrix, Fp8Operands, cast, padded, scale_inv_of

_IS_ON_CPU = has_kernel("aten::_scaled_mm_v2", "CPU")
"""torch 2.13 has fp8 products on the CPU, torch 2.11 only on GPUs."""


def transposed(matrix: Fp8Matrix) -> Fp8Matrix:
    """Transpose [M, N] to [N, padded(M)], padded with zeros, which add nothing to a sum over M."""
    values, scale_inv = matrix
    if values.is_cuda:
        return Fp8Matrix(_kernels().transposed(values), scale_inv)
    # As bytes: every device has these operations for bytes, and an fp8 zero is a zero byte.
    across = values.view(torch.uint8).t()
    missing = padded(len(values)) - len(values)
    across = pad(across, (0, missing)) if missing else across.contiguous()
    return Fp8Matrix(across.view(values.dtype), scale_inv)


def _kernels() -> ModuleType:
    from patch.model.fp8 import kernels as fp8_kernels  # only CUDA builds of torch have Triton

    return fp8_kernels


def quantize(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    scale_inv: torch.Tensor | None = None,
    agree: Callable[[torch.Tensor], None] | None = None,
) -> Fp8Matrix:
    """Return a matrix in fp8, each value rounded to the nearest.

    Args:
        matrix: [M, N], float32 or bfloat16.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scale_inv: from an earlier call with the same matrix, to save the search for the amax.
        agree: raises the amax, given as int32 bits, to the amax of the full matrix; None if `matrix` is full.
            Bits, because communication libraries may lose a NaN among floats.
    """
    if matrix.is_cuda:
        quantize_cuda = _kernels().quantize_operands
        return quantize_cuda(matrix, dtype, columns=False, scale_inv=scale_inv, agree=agree).rows
    if scale_inv is None:
        amax = noted_amax(matrix) if agree is None else None
        amax = largest_of(matrix) if amax is None else amax
        if agree is not None:
            agree(amax.view(torch.int32))
        scale_inv = scale_inv_of(amax, dtype)
    return Fp8Matrix(cast(matrix, scale_inv, dtype).contiguous(), scale_inv)


def quantize_operands(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = True,
    scale_inv: torch.Tensor | None = None,
) -> Fp8Operands:
    """Return a matrix as operands of products that sum along its rows, its columns, or both.

    `matrix`, `dtype` and `scale_inv` are as in `quantize`.
    """
    if matrix.is_cuda:
        return _kernels().quantize_operands(matrix, dtype, rows=rows, columns=columns, scale_inv=scale_inv)
    both = quantize(matrix, dtype, scale_inv)
    return Fp8Operands(both if rows else None, transposed(both) if columns else None)


def product(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """Multiply a @ b.T: [M, K] and [N, K] to [M, N], summed in float32. Only `a` may be e5m2.

    `fast` uses the tensor cores' sums with fewer bits (CUDA), for a forward.
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
    """Add a @ b.T to a contiguous `total` [M, N], or write it if `overwrite`.

    The product is not rounded first, unless cuBLASLt refuses it: then CUDA rounds it to `dtype`.
    """
    if not total.is_cuda:
        dtype = total.dtype
    elif total.dtype == torch.float32 and not cublaslt.obstacle(total.device, a.values.dtype):
        cublaslt.add_product(total, a, b, overwrite=overwrite)
        return
    found = product(a, b, dtype)
    total.copy_(found) if overwrite else total.add_(found)
