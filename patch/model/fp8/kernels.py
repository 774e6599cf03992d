"""fp8 operands on CUDA, in Triton: one kernel finds the amax, one kernel casts and transposes.

The first kernel is not needed if the kernel that wrote a matrix noted its amax (`note_amax`). The second
kernel reads the matrix once for both operands. The results are bitwise those of matrix.py. If a value is not
finite, only the scale (NaN) is the same. The host does not wait. With TRITON_INTERPRET=1 before the import,
Triton's interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from patch.amax import noted_amax
from patch.fp8 import SIGN_AND_EXPONENT, SMALLEST_AMAX, Fp8Matrix, Fp8Operands, padded

_ROWS, _COLUMNS = 64, 128
"""Rows and columns of a tile, which a program keeps in registers and transposes through shared memory."""
_KINDS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_SMALLEST = tl.constexpr(SMALLEST_AMAX)
_EXPONENT = tl.constexpr(SIGN_AND_EXPONENT)


def quantize_operands(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = True,
    scale_inv: torch.Tensor | None = None,
    agree: Callable[[torch.Tensor], None] | None = None,
) -> Fp8Operands:
    """See matrix.quantize_operands and, for `agree`, matrix.quantize."""
    is_known = scale_inv is not None
    scale = matrix.new_empty((), dtype=torch.float32) if scale_inv is None else scale_inv
    bits = scale.view(torch.int32) if is_known else _amax_bits(matrix, is_whole=agree is None)
    if agree is not None and not is_known:
        agree(bits)
    num_rows, num_columns = matrix.shape
    straight = matrix.new_empty(num_rows if rows else 0, num_columns, dtype=dtype)
    across = matrix.new_empty(num_columns if columns else 0, padded(num_rows), dtype=dtype)
    _cast_tile[_tiles(padded(num_rows), num_columns)](
        matrix, straight, across, bits, scale, num_rows, num_columns, *matrix.stride(), across.shape[1],
        torch.finfo(dtype).max, rows, columns, is_known, _KINDS[dtype], _ROWS, _COLUMNS,
    )  # fmt: skip
    of_rows, of_columns = Fp8Matrix(straight, scale), Fp8Matrix(across, scale)
    return Fp8Operands(of_rows if rows else None, of_columns if columns else None)


def transposed(values: torch.Tensor) -> torch.Tensor:
    """Transpose fp8 values [M, N] to [N, padded(M)], padded with zeros."""
    num_rows, num_columns = values.shape
    out = values.new_empty(num_columns, padded(num_rows))
    source, target = values.view(torch.uint8), out.view(torch.uint8)
    _turn[_tiles(out.shape[1], num_columns)](
        source, target, num_rows, num_columns, *source.stride(), out.shape[1], _ROWS, _COLUMNS
    )
    return out


def _amax_bits(matrix: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
    """Return the bits of the amax. For a full matrix, the amax that was noted is used if there is one."""
    amax = noted_amax(matrix) if is_whole else None
    if amax is not None:
        return amax.view(torch.int32)
    bits = matrix.new_zeros((), dtype=torch.int32)
    if matrix.numel():
        _amax_tile[_tiles(*matrix.shape)](matrix, bits, *matrix.shape, *matrix.stride(), _ROWS, _COLUMNS)
    return bits


def _tiles(num_rows: int, num_columns: int) -> tuple[int, int]:
    # CUDA allows 65535 programs along the second axis; rows are tokens, of which there may be more.
    return triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, _COLUMNS)


@triton.jit
def _amax_tile(
    x: tl.tensor, target: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, row_stride: tl.tensor, column_stride: tl.tensor,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
) -> None:  # fmt: skip
    """Raise the amax to the amax of a tile, as bits: they are ordered as absolute values, NaN above all."""
    m = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    n = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    place = m.to(tl.int64)[:, None] * row_stride + n.to(tl.int64)[None, :] * column_stride
    number = tl.load(x + place, inside, other=0.0).to(tl.float32)
    bits = number.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.atomic_max(target, tl.max(tl.max(bits, axis=1), axis=0))


@triton.jit
def _scale_of(
    bits: tl.tensor, scale_inv: tl.tensor, is_first: tl.tensor, largest: tl.tensor, is_known: tl.constexpr
) -> tl.tensor:
    """Return the scale; if it is new, the first program writes its inverse."""
    if is_known:
        return tl.div_rn(1.0, tl.load(scale_inv))
    amax = tl.load(bits).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(largest, tl.where(amax < _SMALLEST, _SMALLEST, amax))
    scale = (ratio.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    tl.store(scale_inv, tl.div_rn(1.0, scale) + (amax - amax), is_first)
    return scale


@triton.jit
def _cast_tile(
    x: tl.tensor, straight: tl.tensor, across: tl.tensor, bits: tl.tensor, scale_inv: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, row_stride: tl.tensor, column_stride: tl.tensor,
    padded_rows: tl.tensor, largest: tl.tensor,
    has_rows: tl.constexpr, has_columns: tl.constexpr, is_known: tl.constexpr, dtype: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
) -> None:  # fmt: skip
    m = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    n = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    m_long, n_long = m.to(tl.int64), n.to(tl.int64)
    place = m_long[:, None] * row_stride + n_long[None, :] * column_stride
    number = tl.load(x + place, inside, other=0.0).to(tl.float32)
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    scaled = (number * _scale_of(bits, scale_inv, is_first, largest, is_known)).to(dtype)
    if has_rows:
        tl.store(straight + m_long[:, None] * num_columns + n[None, :], scaled, inside)
    if has_columns:
        target = across + n_long[:, None] * padded_rows + m[None, :]
        tl.store(target, tl.trans(scaled), (n < num_columns)[:, None] & (m < padded_rows)[None, :])


@triton.jit
def _turn(
    x: tl.tensor, across: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, row_stride: tl.tensor, column_stride: tl.tensor,
    padded_rows: tl.tensor, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
) -> None:  # fmt: skip
    m = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    n = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    m_long, n_long = m.to(tl.int64), n.to(tl.int64)
    number = tl.load(x + m_long[:, None] * row_stride + n_long[None, :] * column_stride, inside, other=0)
    target = across + n_long[:, None] * padded_rows + m[None, :]
    tl.store(target, tl.trans(number), (n < num_columns)[:, None] & (m < padded_rows)[None, :])
