"""The operations of `LayerKernels` in Triton: each kernel reads and writes every element once.

The plain forms of the other kernels are in mlp.py (`bias_gelu`), experts/grouped.py (`weighted_swiglu`),
nf4_product.py (`dequantize_nf4`) and attention/ring_attention.py (`merge_attention`). `add_rows` serves
weight_gradient.py.

Products are rounded before they are added, as in torch (enable_fp_fusion=False). With TRITON_INTERPRET=1
before the import, Triton's interpreter runs the kernels on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = tl.constexpr(1024)
_NF4_BLOCKS = tl.constexpr(16)
"""Blocks of 64 values per program."""
_ROWS, _ROW_COLUMNS = tl.constexpr(16), tl.constexpr(256)
"""Rows and columns of a gradient that a program adds at a time."""
_MERGED = 2048
"""Elements of attention per program."""


def swiglu(gate_up: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
    """See LayerKernels."""
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    product = gate_up.new_empty(*gate_up.shape[:-1], width)
    if product.numel():
        bits = None if amax is None else amax.view(torch.int32)
        _swiglu[_grid(product, width)](gate_up, product, bits, width, enable_fp_fusion=False)
    return product


def swiglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, amax: torch.Tensor | None = None
) -> torch.Tensor:
    """See LayerKernels."""
    gradient, gate_up = gradient.contiguous(), gate_up.contiguous()
    of_gate_up = torch.empty_like(gate_up)
    width = gradient.shape[-1]
    if gradient.numel():
        grid, bits = _grid(gradient, width), None if amax is None else amax.view(torch.int32)
        _swiglu_backward[grid](gradient, gate_up, of_gate_up, bits, width, enable_fp_fusion=False)
    return of_gate_up


def weighted_swiglu(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up times the weight of each row: [T, 2 F] and [T] in, [T, F] out."""
    active = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
    if active.numel():
        grid = _grid(active, active.shape[1])
        _weighted_swiglu[grid](gate_up, weights, active, active.shape[1], enable_fp_fusion=False)
    return active


def weighted_swiglu_backward(
    gradient: torch.Tensor, gate_up: torch.Tensor, weights: torch.Tensor, of_weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of gate_up, and the output of `weighted_swiglu`; write `of_weights` [T]."""
    of_gate_up, active = torch.empty_like(gate_up), torch.empty_like(gradient)
    if active.numel():
        _weighted_swiglu_backward[len(active),](
            gradient, gate_up, weights, of_gate_up, active, of_weights, active.shape[1],
            enable_fp_fusion=False,
        )  # fmt: skip
    return of_gate_up, active


def bias_gelu(hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return gelu(hidden + bias) in its tanh form: [..., F] and [F] in, [..., F] out."""
    hidden, active = hidden.contiguous(), torch.empty_like(hidden, memory_format=torch.contiguous_format)
    if hidden.numel():
        width = len(bias)
        _bias_gelu[_grid(hidden, width)](hidden, bias, active, width, enable_fp_fusion=False)
    return active


def bias_gelu_backward(gradient: torch.Tensor, hidden: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return the gradient of hidden, from the gradient of `bias_gelu`."""
    gradient, hidden = gradient.contiguous(), hidden.contiguous()
    of_hidden = torch.empty_like(hidden)
    if hidden.numel():
        grid = _grid(hidden, len(bias))
        _bias_gelu_backward[grid](gradient, hidden, bias, of_hidden, len(bias), enable_fp_fusion=False)
    return of_hidden


def rotate(heads: torch.Tensor, table: torch.Tensor, *, back: bool) -> torch.Tensor:
    """See LayerKernels."""
    heads = heads.contiguous()
    num_heads, size = heads.shape[2:]
    turned = torch.empty_like(heads)
    if heads.numel():
        sizes = num_heads, size // 2, *_tile(num_heads, size)
        _rotate[(heads.shape[0] * heads.shape[1],)](
            heads, turned, table.contiguous(), *_rows(heads, table), back, sizes, enable_fp_fusion=False
        )
    return turned


def split_qkv(mixed: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See LayerKernels."""
    mixed, size = mixed.contiguous(), 2 * table.shape[-1]
    *tokens, groups, width = mixed.shape
    query = mixed.new_empty(*tokens, groups * (width // size - 2), size)
    key, value = (mixed.new_empty(*tokens, groups, size) for _ in range(2))
    _split_or_join(mixed, query, key, value, table, is_join=False)
    return query, key, value


def join_qkv(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
) -> torch.Tensor:
    """See LayerKernels."""
    query, key, value = (heads.contiguous() for heads in (query, key, value))
    *tokens, groups, size = key.shape
    mixed = key.new_empty(*tokens, groups, (query.shape[2] // groups + 2) * size)
    _split_or_join(mixed, query, key, value, table, is_join=True)
    return mixed


def dequantize_nf4(
    codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, weight: torch.Tensor
) -> None:
    """Write the weight [O, I] of rows that begin with codes (nf4_product.py), and of scales [O, I / 64]."""
    blocks = weight.shape[1] // 64
    if weight.numel():
        grid = len(weight), triton.cdiv(blocks, _NF4_BLOCKS.value)
        _dequantize_nf4[grid](codes, scales, levels, weight, blocks, codes.stride(0), scales.stride(0))


def merge_attention(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
    """Merge attention to further keys into `out`, by the log-sum-exp of the scores.

    Args:
        out: [B, N, Q, D] float32, a slice along Q of a tensor laid out as [S, B, N, D]; not read where `lse`
            is -inf.
        lse: [B, N, Q] float32, a slice along Q of a contiguous tensor; updated to all keys.
        part: [B, N, Q, D] of any dtype.
        part_lse: [B, N, Q] float32, finite.
    """
    _, heads, queries, size = part.shape
    part = part.transpose(1, 2).contiguous()  # the layout of the attention kernels
    if part.numel():
        width = triton.next_power_of_2(size)
        block = max(1, _MERGED // width)
        grid = triton.cdiv(queries, block), len(part) * heads
        sizes = heads, size, block, width
        _merge_attention[grid](
            out, lse, part, part_lse.contiguous(), out.stride(2), lse.stride(1), queries, sizes,
            enable_fp_fusion=False,
        )  # fmt: skip


def add_rows(total: torch.Tensor, numbers: torch.Tensor, rows: torch.Tensor) -> None:
    """Add each row of rows [T, H] to the row of total [V, H] given by numbers [T]; -1 means no row.

    Rows with the same number are summed in float32 first, always in the same order.
    """
    rows, width = rows.contiguous(), rows.shape[1]
    if rows.numel():
        numbers, order = torch.sort(numbers, stable=True)
        ends = torch.searchsorted(numbers, numbers, right=True)
        grid = len(rows), triton.cdiv(width, _ROW_COLUMNS.value)
        _add_rows[grid](total, numbers, order, ends, rows, width)


def _split_or_join(
    mixed: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor,
    *, is_join: bool,
) -> None:  # fmt: skip
    if not mixed.numel():
        return
    groups, size = key.shape[2:]
    queries = query.shape[2] // groups
    sizes = groups, queries, size // 2, *_tile(queries + 2, size), is_join
    _qkv[(key.shape[0] * key.shape[1], groups)](
        mixed, query, key, value, table.contiguous(), *_rows(key, table), sizes, enable_fp_fusion=False
    )


def _grid(rows: torch.Tensor, width: int) -> tuple[int, int]:
    return rows.numel() // width, triton.cdiv(width, _BLOCK.value)


def _rows(heads: torch.Tensor, table: torch.Tensor) -> tuple[int, int]:
    """Return B, and the table's rows per position: B or 1."""
    return heads.shape[1], table.shape[2]


def _tile(num_heads: int, size: int) -> tuple[int, int]:
    return triton.next_power_of_2(num_heads), triton.next_power_of_2(size // 2)


@triton.jit
def _gate_and_up(gate_up: tl.tensor, row: tl.tensor, i: tl.tensor, width: tl.tensor) -> tl.tensor:
    """Load columns i of both halves of a row [2 F], the second as float32; 0 outside the row."""
    begin = gate_up + row * 2 * width + i
    return tl.load(begin, i < width, other=0), tl.load(begin + width, i < width, other=0).to(tl.float32)


@triton.jit
def _silu(gate: tl.tensor) -> tl.tensor:
    wide = gate.to(tl.float32)
    return tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype).to(tl.float32)


@triton.jit
def _gradient_of_gate(gate: tl.tensor, up: tl.tensor, of_product: tl.tensor) -> tl.tensor:
    wide = gate.to(tl.float32)
    sigmoid = tl.div_rn(1.0, 1.0 + tl.exp(-wide))
    of_silu = (of_product * up).to(gate.dtype).to(tl.float32)
    return of_silu * sigmoid * (1.0 + wide * (1.0 - sigmoid))


@triton.jit
def _magnitude(number: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return the bits of an absolute rounded value: they are ordered as the values, NaN above all."""
    return number.to(dtype).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _raise_amax(amax: tl.tensor, bits: tl.tensor, inside: tl.tensor) -> None:
    # Relaxed: amax is not read before the kernel ends, and a fence would wait for the block's stores.
    tl.atomic_max(amax, tl.max(tl.where(inside, bits, 0), axis=0), sem="relaxed")


@triton.jit
def _swiglu(gate_up: tl.tensor, product: tl.tensor, amax: tl.tensor | None, width: tl.tensor) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < width
    gate, up = _gate_and_up(gate_up, row, i, width)
    active = _silu(gate) * up
    tl.store(product + row * width + i, active, inside)
    if amax is not None:
        _raise_amax(amax, _magnitude(active, gate.dtype), inside)


@triton.jit
def _swiglu_backward(
    gradient: tl.tensor, gate_up: tl.tensor, of_gate_up: tl.tensor, amax: tl.tensor | None, width: tl.tensor
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < width
    gate, up = _gate_and_up(gate_up, row, i, width)
    of_product = tl.load(gradient + row * width + i, inside).to(tl.float32)
    of_gate, of_up = _gradient_of_gate(gate, up, of_product), of_product * _silu(gate)
    tl.store(of_gate_up + row * 2 * width + i, of_gate, inside)
    tl.store(of_gate_up + row * 2 * width + width + i, of_up, inside)
    if amax is not None:
        bits = tl.maximum(_magnitude(of_gate, gate.dtype), _magnitude(of_up, gate.dtype))
        _raise_amax(amax, bits, inside)


@triton.jit
def _weighted_swiglu(gate_up: tl.tensor, weights: tl.tensor, active: tl.tensor, width: tl.tensor) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < width
    gate, up = _gate_and_up(gate_up, row, i, width)
    product = (_silu(gate) * up).to(gate.dtype).to(tl.float32)
    tl.store(active + row * width + i, product * tl.load(weights + row).to(tl.float32), inside)


@triton.jit
def _weighted_swiglu_backward(
    gradient: tl.tensor, gate_up: tl.tensor, weights: tl.tensor, of_gate_up: tl.tensor, active: tl.tensor,
    of_weights: tl.tensor, width: tl.constexpr,
) -> None:  # fmt: skip
    """Process a full row, because the gradient of its weight is a sum over the row."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row).to(tl.float32)
    sums = tl.full((_BLOCK,), 0.0, tl.float32)
    for start in range(0, width, _BLOCK):
        i = start + tl.arange(0, _BLOCK)
        inside = i < width
        gate, up = _gate_and_up(gate_up, row, i, width)
        of_active = tl.load(gradient + row * width + i, inside, other=0).to(tl.float32)
        silu = _silu(gate)
        product = (silu * up).to(gate.dtype).to(tl.float32)
        sums += of_active * product
        of_product = (of_active * weight).to(gate.dtype).to(tl.float32)
        tl.store(of_gate_up + row * 2 * width + i, _gradient_of_gate(gate, up, of_product), inside)
        tl.store(of_gate_up + row * 2 * width + width + i, of_product * silu, inside)
        tl.store(active + row * width + i, product * weight, inside)
    tl.store(of_weights + row, tl.sum(sums, axis=0))


@triton.jit
def _gelu_parts(hidden: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """Return x = hidden + bias, rounded; sigmoid(2 u), which is 0.5 (1 + tanh(u)); and u' of u = sqrt(2 / pi)
    (x + 0.044715 x^3).
    """
    x = (hidden.to(tl.float32) + bias.to(tl.float32)).to(hidden.dtype).to(tl.float32)
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    return x, tl.div_rn(1.0, 1.0 + tl.exp(-2.0 * u)), slope


@triton.jit
def _bias_gelu(hidden: tl.tensor, bias: tl.tensor, active: tl.tensor, width: tl.tensor) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < width
    x, sigmoid, _ = _gelu_parts(tl.load(hidden + row * width + i, inside), tl.load(bias + i, inside))
    tl.store(active + row * width + i, x * sigmoid, inside)


@triton.jit
def _bias_gelu_backward(
    gradient: tl.tensor, hidden: tl.tensor, bias: tl.tensor, of_hidden: tl.tensor, width: tl.tensor
) -> None:
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    inside = i < width
    x, sigmoid, slope = _gelu_parts(tl.load(hidden + row * width + i, inside), tl.load(bias + i, inside))
    of_active = tl.load(gradient + row * width + i, inside).to(tl.float32)
    of_sum = of_active * sigmoid * (1.0 + 2.0 * x * (1.0 - sigmoid) * slope)
    tl.store(of_hidden + row * width + i, of_sum, inside)


@triton.jit
def _turned(
    first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor, back: tl.constexpr
) -> tl.tensor:
    """Return both rotated halves of heads; each product is rounded to the heads' dtype."""
    kind = first.dtype
    c, s = cos.to(kind).to(tl.float32), sin.to(kind).to(tl.float32)
    if back:
        s = -s
    a, b = first.to(tl.float32), second.to(tl.float32)
    ac, bs = (a * c).to(kind).to(tl.float32), (b * s).to(kind).to(tl.float32)
    bc, as_ = (b * c).to(kind).to(tl.float32), (a * s).to(kind).to(tl.float32)
    return (ac - bs).to(kind), (bc + as_).to(kind)


@triton.jit
def _angles(
    table: tl.tensor, token: tl.tensor, rows: tl.tensor, table_rows: tl.tensor,
    j: tl.tensor, half: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Load the cosines and sines [D / 2] of a token; axis 0 of the grid has one program per token."""
    at = table + (token // rows * table_rows + token % rows % table_rows) * half + j
    sines = tl.num_programs(0).to(tl.int64) // rows * table_rows * half
    return tl.load(at, j < half), tl.load(at + sines, j < half)


@triton.jit
def _rotate(
    heads: tl.tensor, turned: tl.tensor, table: tl.tensor, rows: tl.tensor, table_rows: tl.tensor,
    back: tl.constexpr, sizes: tl.constexpr,
) -> None:  # fmt: skip
    """Rotate all heads of a token. `sizes`: heads, D / 2, and both as powers of two."""
    num_heads: tl.constexpr = sizes[0]
    half: tl.constexpr = sizes[1]
    token = tl.program_id(0).to(tl.int64)
    head, j = tl.arange(0, sizes[2])[:, None], tl.arange(0, sizes[3])[None]
    c, s = _angles(table, token, rows, table_rows, j, half)
    at = (token * num_heads + head) * 2 * half + j
    inside = (head < num_heads) & (j < half)
    first, second = _turned(tl.load(heads + at, inside), tl.load(heads + at + half, inside), c, s, back)
    tl.store(turned + at, first, inside)
    tl.store(turned + at + half, second, inside)


@triton.jit
def _qkv(
    mixed: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor, table: tl.tensor,
    rows: tl.tensor, table_rows: tl.tensor, sizes: tl.constexpr,
) -> None:  # fmt: skip
    """Split or join one group of a token: its query heads, key and value."""
    # Sizes: groups, queries per group, D / 2, heads per group and D / 2 as powers of two, whether to join.
    queries: tl.constexpr = sizes[1]
    half: tl.constexpr = sizes[2]
    is_join: tl.constexpr = sizes[5]
    token = tl.program_id(0).to(tl.int64)
    group = token * sizes[0] + tl.program_id(1)
    head, j = tl.arange(0, sizes[3])[:, None], tl.arange(0, sizes[4])[None]
    c, s = _angles(table, token, rows, table_rows, j, half)
    # Rows of the tile: queries, key, value, and padding up to a power of two.
    is_query, is_key, is_value = head < queries, head == queries, head == queries + 1
    inside = j < half
    merged = mixed + (group * (queries + 2) + head) * 2 * half + j
    of_query = query + (group * queries + head) * 2 * half + j
    of_key = key + group * 2 * half + j + head * 0
    of_value = value + group * 2 * half + j + head * 0
    if is_join:
        first = _gather(of_query, of_key, of_value, is_query, is_key, is_value, inside)
        second = _gather(of_query + half, of_key + half, of_value + half, is_query, is_key, is_value, inside)
    else:
        of_group = (head < queries + 2) & inside
        first, second = tl.load(merged, of_group), tl.load(merged + half, of_group)
    left, right = _turned(first, second, c, s, is_join)
    left, right = tl.where(is_value, first, left), tl.where(is_value, second, right)
    if is_join:
        of_group = (head < queries + 2) & inside
        tl.store(merged, left, of_group)
        tl.store(merged + half, right, of_group)
    else:
        tl.store(of_query, left, is_query & inside)
        tl.store(of_query + half, right, is_query & inside)
        tl.store(of_key, left, is_key & inside)
        tl.store(of_key + half, right, is_key & inside)
        tl.store(of_value, left, is_value & inside)
        tl.store(of_value + half, right, is_value & inside)


@triton.jit
def _gather(
    query: tl.tensor, key: tl.tensor, value: tl.tensor,
    is_query: tl.tensor, is_key: tl.tensor, is_value: tl.tensor, inside: tl.tensor,
) -> tl.tensor:  # fmt: skip
    of_pair = tl.where(is_key, tl.load(key, is_key & inside), tl.load(value, is_value & inside))
    return tl.where(is_query, tl.load(query, is_query & inside), of_pair)


@triton.jit
def _dequantize_nf4(
    codes: tl.tensor, scales: tl.tensor, levels: tl.tensor, weight: tl.tensor, blocks: tl.tensor,
    code_stride: tl.tensor, scale_stride: tl.tensor,
) -> None:  # fmt: skip
    """Dequantize blocks of a row: 32 bytes of codes per block, and a scale per block."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * _NF4_BLOCKS + tl.arange(0, _NF4_BLOCKS)[:, None]
    inside = block < blocks
    byte = tl.load(codes + row * code_stride + block * 32 + tl.arange(0, 32)[None], inside, other=0)
    scale = tl.load(scales + row * scale_stride + block, inside)
    pairs = tl.join(tl.load(levels + (byte >> 4).to(tl.int32)), tl.load(levels + (byte & 15).to(tl.int32)))
    values = tl.reshape(pairs, (_NF4_BLOCKS, 64)) * scale
    tl.store(weight + (row * blocks + block) * 64 + tl.arange(0, 64)[None], values, inside)


@triton.jit
def _merge_attention(
    out: tl.tensor, lse: tl.tensor, part: tl.tensor, part_lse: tl.tensor,
    token_stride: tl.tensor, head_stride: tl.tensor, queries: tl.tensor, sizes: tl.constexpr,
) -> None:  # fmt: skip
    """Merge a block of queries of one head of a row."""
    heads: tl.constexpr = sizes[0]
    size: tl.constexpr = sizes[1]
    pair = tl.program_id(1).to(tl.int64)
    q = tl.program_id(0).to(tl.int64) * sizes[2] + tl.arange(0, sizes[2])
    d = tl.arange(0, sizes[3])[None, :]
    given = q < queries
    inside = given[:, None] & (d < size)
    at_lse = lse + pair * head_stride + q
    before = tl.load(at_lse, given, other=0.0)
    other = tl.load(part_lse + pair * queries + q, given, other=0.0)
    peak = tl.maximum(before, other)
    old, new = tl.exp(before - peak), tl.exp(other - peak)
    total = old + new
    at = out + q[:, None] * token_stride + pair * size + d
    token = pair // heads * queries + q
    added = tl.load(part + (token[:, None] * heads + pair % heads) * size + d, inside, other=0).to(tl.float32)
    is_read = inside & (before > float("-inf"))[:, None]
    merged = tl.load(at, is_read, other=0.0) * tl.div_rn(old, total)[:, None]
    tl.store(at, merged + added * tl.div_rn(new, total)[:, None], inside)
    tl.debug_barrier()  # all threads must have read lse before it is overwritten
    tl.store(at_lse, peak + tl.log(total), given)


@triton.jit
def _add_rows(
    total: tl.tensor, numbers: tl.tensor, order: tl.tensor, ends: tl.tensor, rows: tl.tensor, width: tl.tensor
) -> None:
    """Sum all rows of one number; the program of the number's first row does it."""
    place = tl.program_id(0)
    number = tl.load(numbers + place)
    before = tl.load(numbers + place - 1, place > 0, other=-1)
    if number != before:  # rows with -1 are skipped too
        i = tl.program_id(1) * _ROW_COLUMNS + tl.arange(0, _ROW_COLUMNS)
        end = tl.load(ends + place).to(tl.int32)
        sums = tl.full((_ROWS, _ROW_COLUMNS), 0.0, tl.float32)
        for begin in range(place, end, _ROWS):
            j = begin + tl.arange(0, _ROWS)
            token = tl.load(order + j, j < end, other=0)
            inside = (j < end)[:, None] & (i < width)[None, :]
            sums += tl.load(rows + token[:, None] * width + i[None, :], inside, other=0.0).to(tl.float32)
        at = total + number * width + i
        tl.store(at, tl.load(at, i < width).to(tl.float32) + tl.sum(sums, axis=0), i < width)
