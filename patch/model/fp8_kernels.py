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
_NONE, _ALL, _OF_ROW, _OF_COLUMN = 0, 1, 2, 3
"""Which scale: no result is asked for, one for all, one for each row, one for each column."""
_KINDS = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}
_BY_DIM = {None: _ALL, 1: _OF_ROW, 0: _OF_COLUMN}
_SMALLEST = tl.constexpr(SMALLEST_AMAX)
_EXPONENT = tl.constexpr(SIGN_AND_EXPONENT)
_ALL_NUMBERS, _ROW, _COLUMN = tl.constexpr(_ALL), tl.constexpr(_OF_ROW), tl.constexpr(_OF_COLUMN)
_NOTHING = tl.constexpr(_NONE)


def quantize(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    shared_dim: int | None,
    scale_inv: torch.Tensor | None = None,
    agree: Callable[[torch.Tensor], None] | None = None,
) -> Fp8Matrix:
    """See fp8_matrix.quantize."""
    found, _ = _cast(matrix, dtype, (_BY_DIM[shared_dim], _NONE), (scale_inv, None), agree)
    assert found is not None
    return found


def factors(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    rows: bool,
    columns: bool,
    known: tuple[torch.Tensor | None, torch.Tensor | None],
) -> Factors:
    """See fp8_matrix.factors."""
    kinds = (_OF_ROW, _OF_COLUMN) if rowwise else (_ALL, _ALL)
    return Factors(*_cast(matrix, dtype, (kinds[0] * rows, kinds[1] * columns), known))


def transposed(values: torch.Tensor) -> torch.Tensor:
    """[M, N] 8-bit values as [N, padded(M)], with zeros."""
    num_rows, num_columns = values.shape
    out = values.new_empty(num_columns, padded(num_rows))
    source, target = values.view(torch.uint8), out.view(torch.uint8)
    _turn[_tiles(out.shape[1], num_columns)](
        source, target, num_rows, num_columns, *source.stride(), out.shape[1], _ROWS, _COLUMNS
    )
    return out


def _cast(
    matrix: torch.Tensor,
    dtype: torch.dtype,
    kinds: tuple[int, int],
    known: tuple[torch.Tensor | None, torch.Tensor | None],
    agree: Callable[[torch.Tensor], None] | None = None,
) -> tuple[Fp8Matrix | None, Fp8Matrix | None]:
    """The matrix and its transposed one, with scales of these kinds; known ones are not searched.

    `agree` is of the first kind.
    """
    num_rows, num_columns = matrix.shape
    if kinds == (_ALL, _ALL):
        known = (known[0] if known[0] is not None else known[1],) * 2
    unknown = tuple(kind if scale is None else _NONE for kind, scale in zip(kinds, known, strict=True))
    bits = _amax_bits(matrix, unknown, is_whole=agree is None)
    if agree is not None:
        agree(bits[0])
    scales = [
        matrix.new_empty(_scale_shape(kind, matrix.shape), dtype=torch.float32) if scale is None else scale
        for kind, scale in zip(kinds, known, strict=True)
    ]
    if kinds == (_ALL, _ALL):
        scales[1] = scales[0]
    straight = matrix.new_empty(num_rows if kinds[0] else 0, num_columns, dtype=dtype)
    across = matrix.new_empty(num_columns if kinds[1] else 0, padded(num_rows), dtype=dtype)
    _cast_tile[_tiles(padded(num_rows), num_columns)](
        matrix, straight, across, *bits, *scales,
        num_rows, num_columns, *matrix.stride(), across.shape[1], torch.finfo(dtype).max,
        *kinds, *(scale is not None for scale in known), _KINDS[dtype], _ROWS, _COLUMNS,
    )  # fmt: skip
    return (
        Fp8Matrix(straight, scales[0]) if kinds[0] else None,
        Fp8Matrix(across, scales[1].view(-1, 1) if scales[1].dim() else scales[1]) if kinds[1] else None,
    )


def _amax_bits(matrix: torch.Tensor, kinds: tuple[int, ...], *, is_whole: bool) -> list[torch.Tensor]:
    """The bits of the largest absolute number, for each of two kinds of scales; of the same kind once.

    That of a whole matrix is not searched where the kernel that wrote the matrix has noted it.
    """
    amax = noted_amax(matrix) if _ALL in kinds and is_whole else None
    if amax is not None:
        return [amax.view(torch.int32)] * 2
    bits = [matrix.new_zeros(_scale_shape(kind, matrix.shape), dtype=torch.int32) for kind in kinds]
    if kinds[0] == kinds[1]:
        bits[1], kinds = bits[0], (kinds[0], _NONE)
    if any(kinds) and matrix.numel():
        _amax_tile[_tiles(*matrix.shape)](
            matrix, *bits, *matrix.shape, *matrix.stride(), *kinds, _ROWS, _COLUMNS
        )
    return bits


def _scale_shape(kind: int, shape: torch.Size) -> list[int]:
    return {_OF_ROW: [shape[0], 1], _OF_COLUMN: [1, shape[1]]}.get(kind, [])


def _tiles(num_rows: int, num_columns: int) -> tuple[int, int]:
    # CUDA allows 65535 programs along the second axis; rows are tokens, of which there may be more.
    return triton.cdiv(num_rows, _ROWS), triton.cdiv(num_columns, _COLUMNS)


@triton.jit
def _store_amax(
    bits: tl.tensor, target: tl.tensor, m: tl.tensor, n: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, kind: tl.constexpr,
) -> None:  # fmt: skip
    """Raise the largest numbers by those of a tile; whole numbers, so that order does not matter."""
    if kind == _ALL_NUMBERS:
        tl.atomic_max(target, tl.max(tl.max(bits, axis=1), axis=0))
    if kind == _ROW:
        tl.atomic_max(target + m, tl.max(bits, axis=1), mask=m < num_rows)
    if kind == _COLUMN:
        tl.atomic_max(target + n, tl.max(bits, axis=0), mask=n < num_columns)


@triton.jit
def _amax_tile(
    x: tl.tensor, first: tl.tensor, second: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, row_stride: tl.tensor, column_stride: tl.tensor,
    first_kind: tl.constexpr, second_kind: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr,
) -> None:  # fmt: skip
    """The largest absolute numbers of a tile, as bits: of floats without sign they have the same order.

    The bits of NaN are above those of infinity, so it is the largest number, as in torch.
    """
    m = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    n = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    place = m.to(tl.int64)[:, None] * row_stride + n.to(tl.int64)[None, :] * column_stride
    number = tl.load(x + place, inside, other=0.0).to(tl.float32)
    bits = number.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    _store_amax(bits, first, m, n, num_rows, num_columns, first_kind)
    _store_amax(bits, second, m, n, num_rows, num_columns, second_kind)


@triton.jit
def _scale_of(
    bits: tl.tensor, scale_inv: tl.tensor, i: tl.tensor, inside: tl.tensor, is_first: tl.tensor,
    largest: tl.tensor, is_known: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The scales at `i`; where they are new, the first program of a row or column writes their inverse."""
    if is_known:
        return tl.div_rn(1.0, tl.load(scale_inv + i, inside, other=1.0))
    amax = tl.load(bits + i, inside, other=0).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(largest, tl.where(amax < _SMALLEST, _SMALLEST, amax))
    scale = (ratio.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
    tl.store(scale_inv + i, tl.div_rn(1.0, scale) + (amax - amax), inside & is_first)
    return scale


@triton.jit
def _scaled(
    number: tl.tensor, bits: tl.tensor, scale_inv: tl.tensor, m: tl.tensor, n: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, largest: tl.tensor,
    kind: tl.constexpr, is_known: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A tile multiplied by its scales of one kind."""
    begins_column, begins_row = tl.program_id(0) == 0, tl.program_id(1) == 0
    if kind == _ROW:
        scale = _scale_of(bits, scale_inv, m, m < num_rows, begins_row, largest, is_known)[:, None]
    elif kind == _COLUMN:
        scale = _scale_of(bits, scale_inv, n, n < num_columns, begins_column, largest, is_known)[None, :]
    else:
        is_first = begins_column & begins_row
        zero = tl.program_id(0) * 0
        scale = _scale_of(bits, scale_inv, zero, zero == 0, is_first, largest, is_known)
    return number * scale


@triton.jit
def _cast_tile(
    x: tl.tensor, straight: tl.tensor, across: tl.tensor, first_bits: tl.tensor, second_bits: tl.tensor,
    first_inv: tl.tensor, second_inv: tl.tensor,
    num_rows: tl.tensor, num_columns: tl.tensor, row_stride: tl.tensor, column_stride: tl.tensor,
    padded_rows: tl.tensor, largest: tl.tensor,
    first_kind: tl.constexpr, second_kind: tl.constexpr,
    first_known: tl.constexpr, second_known: tl.constexpr, dtype: tl.constexpr,
    tile_rows: tl.constexpr, tile_columns: tl.constexpr,
) -> None:  # fmt: skip
    """Read a tile, scale it, and write it, its transposed one, or both."""
    m = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    n = tl.program_id(1) * tile_columns + tl.arange(0, tile_columns)
    inside = (m < num_rows)[:, None] & (n < num_columns)[None, :]
    m_long, n_long = m.to(tl.int64), n.to(tl.int64)
    place = m_long[:, None] * row_stride + n_long[None, :] * column_stride
    number = tl.load(x + place, inside, other=0.0).to(tl.float32)
    if first_kind != _NOTHING:
        scaled = _scaled(
            number, first_bits, first_inv, m, n, num_rows, num_columns, largest, first_kind, first_known
        )
        tl.store(straight + m_long[:, None] * num_columns + n[None, :], scaled.to(dtype), inside)
    if second_kind != _NOTHING:
        scaled = _scaled(
            number, second_bits, second_inv, m, n, num_rows, num_columns, largest, second_kind, second_known
        )
        target = across + n_long[:, None] * padded_rows + m[None, :]
        is_there = (n < num_columns)[:, None] & (m < padded_rows)[None, :]
        tl.store(target, tl.trans(scaled.to(dtype)), is_there)


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
