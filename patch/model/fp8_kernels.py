"""8-bit factors on CUDA, in Triton: one kernel searches the largest numbers, one casts and transposes.

The first is spared where the kernel that wrote a matrix noted its largest number (`note_amax`). The second
reads the matrix once for both factors. Both compute what fp8_matrix.py does, to the bit; of a matrix with a
number that is not finite only the scale, NaN, is the same. The host does not wait. With
TRITON_INTERPRET=1 before the import, Triton's interpreter runs them on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from patch.eight_bits import SIGN_AND_EXPONENT, SMALLEST_AMAX, Factors, Fp8Matrix, noted_amax, padded

_ROWS, _COLUMNS = 64, 128
"""Rows and columns of a tile, which a program keeps in registers; it is transposed through shared memory."""
_KINDS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_SMALLEST = tl.constexpr(SMALLEST_AMAX)
_EXPONENT = tl.constexpr(SIGN_AND_EXPONENT)


def quantize(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    scale_inv: torch.Tensor | None = None,
    agree: Callable[[torch.Tensor], None] | None = None,
) -> Fp8Matrix:
    """See fp8_matrix.quantize."""
    found = factors(matrix, dtype, columns=False, scale_inv=scale_inv, agree=agree).rows
    assert found is not None
    return found


def factors(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    rows: bool = True,
    columns: bool = True,
    scale_inv: torch.Tensor | None = None,
    agree: Callable[[torch.Tensor], None] | None = None,
) -> Factors:
    """See fp8_matrix.factors and, for `agree`, fp8_matrix.quantize."""
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
    return Factors(of_rows if rows else None, of_columns if columns else None)


def transposed(values: torch.Tensor) -> torch.Tensor:
    """[M, N] 8-bit values as [N, padded(M)], with zeros."""
    num_rows, num_columns = values.shape
    out = values.new_empty(num_columns, padded(num_rows))
    source, target = values.view(torch.uint8), out.view(torch.uint8)
    _turn[_tiles(out.shape[1], num_columns)](
        source, target, num_rows, num_columns, *source.stride(), out.shape[1], _ROWS, _COLUMNS
    )
    return out


def _amax_bits(matrix: torch.Tensor, *, is_whole: bool) -> torch.Tensor:
    """The bits of the largest absolute number.

    That of a whole matrix is not searched where the kernel that wrote the matrix has noted it.
    """
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
    """Raise the largest absolute number by that of a tile, as bits, whose order is that of the numbers.

    The bits of NaN are above those of infinity, so it is the largest number, as in torch.
    """
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
    """The scale; where it is new, the first program writes its inverse."""
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
    """Read a tile, scale it, and write it, its transposed one, or both."""
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
    """Read a tile of bytes and write its transposed one."""
    m = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    n = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    m_long, n_long = m.to(tl.int64), n.to(tl.int64)
    number = tl.load(x + m_long[:, None] * row_stride + n_long[None, :] * column_stride, inside, other=0)
    target = across + n_long[:, None] * padded_rows + m[None, :]
    tl.store(target, tl.trans(number), (n < num_columns)[:, None] & (m < padded_rows)[None, :])
