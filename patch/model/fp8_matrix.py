"""Matrices of 8-bit floats with their scales, and the product of two of them. No autograd, no communication.

Scales are current: made from the numbers they scale, by the device, without a wait of the host. They are
powers of two, so scaling is exact: what a number becomes does not depend on its neighbours unless it is so
small beside the largest of them that it loses bits or vanishes. A scale of half a tensor (TP) therefore gives
the values of the whole one's. A number that is not finite makes its tensor (row-wise: its row) NaN.

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
    """A matrix [M, N] as [N, padded(M)], with zeros, which add nothing to a sum over M.

    The scale, of all or of each column, becomes one of all or of each row.
    """
    values, scale_inv = matrix
    scale_inv = scale_inv.view(-1, 1) if scale_inv.dim() else scale_inv
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
    shared_dim: int | None,
    scale_inv: torch.Tensor | None = None,
    agree: Callable[[torch.Tensor], None] | None = None,
) -> Fp8Matrix:
    """A matrix in 8 bits, each number rounded to the nearest.

    Args:
        matrix: [M, N], float32 or bfloat16.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        shared_dim: the dimension along which numbers share a scale; None: all of the matrix.
        scale_inv: that of an earlier call, if the matrix is the same; it need not be searched again.
        agree: raises the largest numbers, which it gets as bits (int32), to those of a matrix of which this
            is a part. None: it is whole. Of bits, because libraries may lose a NaN among floats.
    """
    if matrix.is_cuda:
        return _kernels().quantize(matrix, dtype, shared_dim, scale_inv, agree)
    if scale_inv is None:
        amax = noted_amax(matrix) if shared_dim is None and agree is None else None
        amax = largest_of(matrix, shared_dim) if amax is None else amax
        if agree is not None:
            agree(amax.view(torch.int32))
        scale_inv = scale_inv_of(amax, dtype)
    return Fp8Matrix(cast(matrix, scale_inv, dtype).contiguous(), scale_inv)


def factors(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    rows: bool = True,
    columns: bool = True,
    scale_inv: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> Factors:
    """A matrix as factors of products that sum along its rows, along its columns, or both.

    Args:
        matrix: [M, N], float32 or bfloat16.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: a scale for each row and for each column instead of one for all.
        rows: the first is needed.
        columns: the second is needed.
        scale_inv: of both, if they are known from an earlier call with the same matrix.
    """
    if matrix.is_cuda:
        return _kernels().factors(matrix, dtype, rowwise=rowwise, rows=rows, columns=columns, known=scale_inv)
    if not rowwise:
        known = scale_inv[0] if scale_inv[0] is not None else scale_inv[1]
        both = quantize(matrix, dtype, None, known)
        return Factors(both if rows else None, transposed(both) if columns else None)
    known = scale_inv[1].view(1, -1) if scale_inv[1] is not None else None
    return Factors(
        quantize(matrix, dtype, 1, scale_inv[0]) if rows else None,
        transposed(quantize(matrix, dtype, 0, known)) if columns else None,
    )


def product(a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, fast: bool = False) -> torch.Tensor:
    """a @ b.T: [M, K] and [N, K] to [M, N], summed in float32.

    Args:
        a: the first factor; e5m2 may be this one only.
        b: the second factor, with scales of the same kind.
        dtype: of the result; CUDA's row-wise kernel has bfloat16 only.
        fast: fewer bits in the tensor cores' sums (CUDA), for a forward.
    """
    if not len(a.values):
        return a.values.new_empty(0, len(b.values), dtype=dtype)
    if not (a.values.is_cuda or _IS_ON_CPU):
        return (a.values.float() @ b.values.float().t() * a.scale_inv * b.scale_inv.t()).to(dtype)
    recipe = ScalingType.RowWise if a.scale_inv.dim() else ScalingType.TensorWise
    return scaled_mm(
        a.values, b.values.t(), a.scale_inv, recipe, b.scale_inv.t(), recipe,
        output_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip


def add_product(
    total: torch.Tensor, a: Fp8Matrix, b: Fp8Matrix, dtype: torch.dtype, *, overwrite: bool
) -> None:
    """total = total + a @ b.T, which is not rounded before on a CPU, nor on CUDA with one scale for a matrix.

    Args:
        total: [M, N], contiguous.
        a, b: see `product`.
        dtype: to which CUDA rounds otherwise.
        overwrite: whether total = a @ b.T, whatever is there.
    """
    if not total.is_cuda:
        dtype = total.dtype
    elif (
        total.dtype == torch.float32
        and not a.scale_inv.dim()
        and not cublaslt.obstacle(total.device, a.values.dtype)
    ):
        cublaslt.add_product(total, a, b, overwrite=overwrite)
        return
    found = product(a, b, dtype)
    total.copy_(found) if overwrite else total.add_(found)
