"""The update in Triton, for CUDA: all items of a call in one launch.

Products and sums are not fused (enable_fp_fusion=False), quotients and roots are rounded to nearest, so the
bits are those of NumPy. With TRITON_INTERPRET=1 before the import, Triton's interpreter runs it on the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from patch.device import send
from patch.optimizer.kernels.spec import (
    AdamScalars,
    UpdateItem,
    bf16_param,
    check_item,
    copy_other_params,
    is_split,
    pointers,
)

_BLOCK = tl.constexpr(1024)  # 2048 need twice the registers, and spill if pointers are not aligned
_COLUMNS = tl.constexpr(20)  # of the table: 9 pointers, number of elements, first block, bits of 9 scalars


class _Form(NamedTuple):
    """The variant of the kernel, compiled for each combination."""

    has_bf16_grad: bool
    has_bf16_param: bool
    is_split: bool
    is_decoupled: bool


class TritonAdam:
    """The update on CUDA tensors, on the current stream; the host does not wait."""

    def update(self, items: Sequence[UpdateItem]) -> None:
        """See AdamKernel. One launch for each form of items: usually one."""
        forms: dict[_Form, list[UpdateItem]] = defaultdict(list)
        for item in items:
            check_item(item)
            form = _Form(
                item.grad.dtype == torch.bfloat16,
                bf16_param(item.states) is not None,
                is_split(item),
                item.scalars.decoupled_weight_decay,
            )
            forms[form].append(item)
        for form, members in forms.items():
            _launch(form, members)
        copy_other_params(items)


def _launch(form: _Form, items: list[UpdateItem]) -> None:
    """Update items of one form, in one launch."""
    rows: list[list[int]] = []
    num_blocks = 0
    for item in items:
        numel = item.grad.numel()
        rows.append([pointer or 0 for pointer in pointers(item)])
        rows[-1] += [numel, num_blocks, *_bits(item.scalars)]
        num_blocks += triton.cdiv(numel, _BLOCK.value)
    if num_blocks:
        _update[(num_blocks,)](
            send(torch.tensor(rows, dtype=torch.int64), items[0].grad.device),
            len(rows),
            *form,
            _alignment(rows),
            enable_fp_fusion=False,
        )


def _bits(scalars: AdamScalars) -> list[int]:
    """The constants as float32, as the integers with the same bits."""
    return np.array(scalars.constants, np.float32).view(np.int32).tolist()


def _alignment(rows: list[list[int]]) -> int:
    """16, for wide loads, if it divides all pointers and numbers of elements; otherwise 1."""
    return 1 if any(value % 16 for row in rows for value in row[:10]) else 16


@triton.jit
def _find_row(table: tl.tensor, num_items: tl.tensor, block: tl.tensor) -> tl.tensor:
    """The table row of a block's item, by binary search: the last item that begins at or before the block."""
    low = 0
    high = num_items
    while high - low > 1:
        middle = (low + high) // 2
        is_right = tl.load(table + middle * _COLUMNS + 10) <= block
        low = tl.where(is_right, middle, low)
        high = tl.where(is_right, high, middle)
    return table + low * _COLUMNS


@triton.jit
def _pointer(row: tl.tensor, column: tl.constexpr, kind: tl.constexpr, alignment: tl.constexpr) -> tl.tensor:
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(kind)), alignment)


@triton.jit
def _float_of_bf16(bits: tl.tensor) -> tl.tensor:
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _join_split(param: tl.tensor, low: tl.tensor) -> tl.tensor:
    low = low.to(tl.uint32)
    return (((param.to(tl.uint32) - (low >> 15)) << 16) | low).to(tl.float32, bitcast=True)


@triton.jit
def _scalar(row: tl.tensor, index: tl.constexpr) -> tl.tensor:
    """One of AdamScalars.constants."""
    return tl.load(row + 11 + index).to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _adam(
    p: tl.tensor, g: tl.tensor, m: tl.tensor, v: tl.tensor,
    row: tl.tensor, is_decoupled: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The update, in the order of operations of spec.py."""
    decay = _scalar(row, 8)
    g = g * _scalar(row, 0)
    if is_decoupled:
        p = p * decay
    else:
        g = g + decay * p
    m = m * _scalar(row, 1) + g * _scalar(row, 2)
    v = v * _scalar(row, 3) + (g * _scalar(row, 4)) * g
    p = p - _scalar(row, 5) * tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), _scalar(row, 6)) + _scalar(row, 7))
    return p, m, v


@triton.jit(do_not_specialize=["num_items"])
def _update(
    table: tl.tensor,
    num_items: tl.tensor,
    has_bf16_grad: tl.constexpr,
    has_bf16_param: tl.constexpr,
    is_split: tl.constexpr,
    is_decoupled: tl.constexpr,
    alignment: tl.constexpr,
) -> None:
    """Update one block of one item."""
    block = tl.program_id(0)
    row = _find_row(table, num_items, block)
    i = (block - tl.load(row + 10)) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < tl.multiple_of(tl.load(row + 9), alignment)

    if has_bf16_grad:
        g = _float_of_bf16(tl.load(_pointer(row, 0, tl.uint16, alignment) + i, inside))
    else:
        g = tl.load(_pointer(row, 0, tl.float32, alignment) + i, inside)
    if is_split:
        low = tl.load(_pointer(row, 1, tl.uint16, alignment) + i, inside)
        p = _join_split(tl.load(_pointer(row, 4, tl.uint16, alignment) + i, inside), low)
    else:
        p = tl.load(_pointer(row, 1, tl.float32, alignment) + i, inside)
    m = tl.load(_pointer(row, 2, tl.float32, alignment) + i, inside)
    v = tl.load(_pointer(row, 3, tl.float32, alignment) + i, inside)

    p, m, v = _adam(p, g, m, v, row, is_decoupled)

    tl.store(_pointer(row, 6, tl.float32, alignment) + i, m, inside)
    tl.store(_pointer(row, 7, tl.float32, alignment) + i, v, inside)
    bits = p.to(tl.uint32, bitcast=True)
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    if has_bf16_param:
        param = tl.where(is_nan, 0x7FC0, (bits + 0x8000) >> 16)
        tl.store(_pointer(row, 8, tl.uint16, alignment) + i, param.to(tl.uint16), inside)
    if is_split:
        low = tl.where(is_nan, 0, bits & 0xFFFF)
        tl.store(_pointer(row, 5, tl.uint16, alignment) + i, low.to(tl.uint16), inside)
    else:
        tl.store(_pointer(row, 5, tl.float32, alignment) + i, p, inside)
