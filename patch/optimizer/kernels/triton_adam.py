"""The update in Triton, for CUDA: all items of a call in one launch.

Products and sums are not fused (enable_fp_fusion=False), quotients and roots are rounded to nearest, so the
bits equal NumPy's. If TRITON_INTERPRET=1 is set before the import, Triton's interpreter runs it on the CPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from patch.config.choices import MOMENT_BLOCK
from patch.device import send
from patch.optimizer.kernels.low_bit_moments import buckets, codes
from patch.optimizer.kernels.spec import (
    AdamKernel,
    AdamScalars,
    PreparedUpdate,
    UpdateItem,
    check_item,
    copy_other_params,
)

_BLOCK = tl.constexpr(1024)  # 2048 needs twice the registers, and spills if pointers are not aligned
_COLUMNS = tl.constexpr(30)  # 9 pointers, numel, first block, 9 scalars, 4 scale pointers, 6 of RngCoords
_SCALED = tl.constexpr(MOMENT_BLOCK)


class _Form(NamedTuple):
    """The variant of the kernel, compiled for each combination."""

    has_bf16_grad: bool
    has_bf16_param: bool
    is_split: bool
    is_decoupled: bool
    kinds: tuple[int, int]
    """Kinds of the moments: 0 float32, 1 bf16, 2 8-bit, -1 none (SGD)."""


class TritonAdam(AdamKernel):
    """The update on CUDA tensors, on the current stream; the host does not wait."""

    def update(self, items: Sequence[UpdateItem]) -> None:
        """See AdamKernel."""
        self.prepare(items, range(len(items)))([item.scalars for item in items])

    def prepare(self, items: Sequence[UpdateItem], groups: Sequence[int]) -> PreparedUpdate:
        """See AdamKernel. An update is one launch for each form of items, usually one in total."""
        forms: dict[_Form, list[tuple[UpdateItem, int]]] = defaultdict(list)
        for item, group in zip(items, groups, strict=True):
            check_item(item)
            form = _Form(
                item.grad.dtype == torch.bfloat16,
                item.states.bf16_param is not None,
                item.is_split,
                item.scalars.decoupled_weight_decay,
                item.moment_kinds,
            )
            forms[form].append((item, group))
        tables = [_Table(form, *zip(*members, strict=True)) for form, members in forms.items()]

        def update(scalars: Sequence[AdamScalars]) -> None:
            for table in tables:
                table.launch(scalars)
            copy_other_params(items)

        return update


class _Table:
    """The rows of items of one form. Only scalars, and keys of random numbers, change from step to step."""

    def __init__(self, form: _Form, items: Sequence[UpdateItem], groups: Sequence[int]) -> None:
        self._form, self._items, self._groups, self._num_blocks = form, items, list(groups), 0
        rows: list[list[int]] = []
        for item in items:
            numel, places = item.grad.numel(), [pointer or 0 for pointer in item.pointers]
            rows.append([*places[:9], numel, self._num_blocks, *_bits(item), *places[9:], *item.rng_numbers])
            self._num_blocks += triton.cdiv(numel, _BLOCK.value)
        self._rows, self._alignment = torch.tensor(rows, dtype=torch.int64), _alignment(rows)

    def launch(self, scalars: Sequence[AdamScalars]) -> None:
        """Update the items with the scalars of each group."""
        *others, kinds = self._form
        bits = [_bits(self._items[0]._replace(scalars=each)) for each in scalars]
        self._rows[:, 11:20] = torch.tensor(bits)[self._groups]
        if 1 in kinds:
            both = zip(self._items, self._groups, strict=True)
            items = [item._replace(scalars=scalars[group]) for item, group in both]
            self._rows[:, 24:30] = torch.tensor([item.rng_numbers for item in items])
        if self._num_blocks:
            device = self._items[0].grad.device
            _update[(self._num_blocks,)](
                send(self._rows, device),
                *_tables(device),
                len(self._items),
                *others,
                *kinds,
                self._alignment,
                enable_fp_fusion=False,
            )


@cache
def _tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    both = np.concatenate([codes(signed=True), codes(signed=False)])
    return send(torch.from_numpy(both), device), send(torch.from_numpy(buckets()), device)


def _bits(item: UpdateItem) -> list[int]:
    return np.array(item.constants, np.float32).view(np.int32).tolist()


def _alignment(rows: list[list[int]]) -> int:
    """Return 16, for wide loads, if 16 divides all pointers and numbers of elements; otherwise 1."""
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


@triton.jit
def _sgd(
    p: tl.tensor, g: tl.tensor, m: tl.tensor, row: tl.tensor, has_momentum: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """The update of SGD, in the order of operations of spec.py."""
    g = g * _scalar(row, 0) + _scalar(row, 8) * p
    m = m * _scalar(row, 1) + g if has_momentum else g
    return p - _scalar(row, 5) * m, m


@triton.jit
def _random(row: tl.tensor, i: tl.tensor) -> tl.tensor:
    """The random numbers of some elements of an item: RngCoords.numbers begin at column 24."""
    place = tl.load(row + 27) + i
    length = tl.load(row + 25)
    number = tl.load(row + 24) + place // length * tl.load(row + 26) + place % length
    high = (number >> 32).to(tl.uint32) * 0x9E3779B9
    second = tl.load(row + 29).to(tl.uint32) + high
    x = number.to(tl.uint32) ^ tl.load(row + 28).to(tl.uint32) ^ high
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = ((x ^ (x >> 15)) + second) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _load_moment(
    row: tl.tensor, codes: tl.tensor, i: tl.tensor, inside: tl.tensor,
    which: tl.constexpr, kind: tl.constexpr, alignment: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    if kind == 0:
        return tl.load(_pointer(row, 2 + which, tl.float32, alignment) + i, inside)
    if kind == 1:
        return _float_of_bf16(tl.load(_pointer(row, 2 + which, tl.uint16, alignment) + i, inside))
    index = tl.load(_pointer(row, 2 + which, tl.uint8, alignment) + i, inside)
    scale = tl.load(_pointer(row, 20 + which, tl.float32, 1) + i // _SCALED, inside)
    return tl.load(codes + 256 * which + index, inside) * scale


@triton.jit
def _store_moment(
    row: tl.tensor, buckets: tl.tensor, x: tl.tensor, number: tl.tensor, i: tl.tensor, inside: tl.tensor,
    which: tl.constexpr, kind: tl.constexpr, alignment: tl.constexpr,
) -> None:  # fmt: skip
    if kind == 0:
        tl.store(_pointer(row, 6 + which, tl.float32, alignment) + i, x, inside)
    bits = x.to(tl.uint32, bitcast=True)
    if kind == 1:
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        number = number >> 16 if which == 1 else number & 0xFFFF
        bits = (tl.where(is_nan, 0x7FC00000, bits) + number) >> 16
        tl.store(_pointer(row, 6 + which, tl.uint16, alignment) + i, bits.to(tl.uint16), inside)
    if kind == 2:
        sizes = tl.where(inside, bits & 0x7FFFFFFF, 0).to(tl.int32)
        largest = tl.max(tl.reshape(sizes, (_BLOCK // _SCALED, _SCALED)), axis=1, keep_dims=True)
        largest = tl.where(largest < 0x800000, 0, largest)
        largest = tl.reshape(tl.broadcast_to(largest, (_BLOCK // _SCALED, _SCALED)), (_BLOCK,))
        scale = largest.to(tl.float32, bitcast=True)
        tl.store(_pointer(row, 22 + which, tl.float32, 1) + i // _SCALED, scale, inside & (i % _SCALED == 0))
        ratio = x * tl.where(largest == 0, 0.0, tl.div_rn(tl.full((_BLOCK,), 1.0, tl.float32), scale))
        bits = ratio.to(tl.uint32, bitcast=True)
        entry = tl.load(buckets + 65536 * which + (bits >> 16)).to(tl.uint32, bitcast=True)
        ordered = tl.where(bits >> 31 == 1, bits ^ 0xFFFF, bits) & 0xFFFF
        index = (entry & 0xFF) + tl.where(ordered > (entry >> 16), 1, 0)
        tl.store(_pointer(row, 6 + which, tl.uint8, alignment) + i, index.to(tl.uint8), inside)


@triton.jit(do_not_specialize=["num_items"])
def _update(
    table: tl.tensor,
    codes: tl.tensor,
    buckets: tl.tensor,
    num_items: tl.tensor,
    has_bf16_grad: tl.constexpr,
    has_bf16_param: tl.constexpr,
    is_split: tl.constexpr,
    is_decoupled: tl.constexpr,
    exp_avg_kind: tl.constexpr,
    exp_avg_sq_kind: tl.constexpr,
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
    m = g
    v = g
    if exp_avg_kind >= 0:
        m = _load_moment(row, codes, i, inside, 0, exp_avg_kind, alignment)
    if exp_avg_sq_kind >= 0:
        v = _load_moment(row, codes, i, inside, 1, exp_avg_sq_kind, alignment)
        p, m, v = _adam(p, g, m, v, row, is_decoupled)
    else:
        p, m = _sgd(p, g, m, row, exp_avg_kind >= 0)

    number = i
    if exp_avg_kind == 1 or exp_avg_sq_kind == 1:
        number = _random(row, i)
    _store_moment(row, buckets, m, number, i, inside, 0, exp_avg_kind, alignment)
    _store_moment(row, buckets, v, number, i, inside, 1, exp_avg_sq_kind, alignment)
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
