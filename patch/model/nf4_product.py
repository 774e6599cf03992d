"""NF4 weights under adapters (arXiv:2305.14314), in the format of bitsandbytes.

A block is 64 values of a row. A row holds whole blocks, so the blocks of a TP shard are blocks of the full
Hugging Face tensor in row-major order. A weight [O, I] is stored as bytes [O, I / 2 + I / 16]:

    codes     I / 2     two values a byte, the first value in the high half
    scales    I / 16    a float32 per block: the largest absolute value of the block

With double quantization a block has an 8-bit code in place of its scale. The code is relative to the mean
scale of the whole tensor, and to the largest difference in 256 neighbouring blocks of the whole tensor. So
each rank reads the whole tensor. A weight is stored as int8 [O, 33 n + 4 (n // 256 + 4)], n = I / 64:

    codes     32 n      as above
    scales    n         the code of each block's scale
    tables    the rest  float32: index of the row's first block in its 256 blocks, the mean, and a scale for
                        each of the 256 blocks that the row meets

Forward and backward each dequantize the weight and free the dense copy after the product.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from patch.families.adapters import BLOCK, SCALES, BaseFormat, row_bytes
from patch.model.linear import Product, TPCollectives

_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
"""The value of each code, as a fraction of the scale of its block: normal quantiles (appendix E)."""
_SMALLEST = 1e-38
"""Lower bound of a scale, to avoid a division by zero."""
_PIECE = 2**22
"""Values that are quantized or dequantized at a time; the temporary tensors take up to 16 bytes per value."""


class _Tables(NamedTuple):
    levels: torch.Tensor
    """[16] float32."""
    bounds: torch.Tensor
    """[15] float32: the boundaries between the values of adjacent codes."""
    pairs: torch.Tensor
    """[256] int64: the two float32 values of each byte."""
    scales: torch.Tensor
    """[256] float32: the value of each 8-bit code of a scale, ascending."""


@cache
def _tables(device: torch.device) -> _Tables:
    levels = torch.tensor(_LEVELS, device=device)
    pairs = torch.cartesian_prod(levels, levels).view(torch.int64).flatten()
    return _Tables(levels, (levels[:-1] + levels[1:]) / 2, pairs, _scale_codes().to(device))


def _scale_codes() -> torch.Tensor:
    """Return bitsandbytes' dynamic map (arXiv:2110.02861): 0, 1, and +- 2 ** power values per decade."""
    decades = []
    for power in range(7):
        bounds = torch.linspace(0.1, 1, 2**power + 1)
        decades.append(10 ** (power - 6) * ((bounds[:-1] + bounds[1:]) / 2))
    values = torch.cat(decades)
    return torch.cat([values, -values, torch.tensor([0.0, 1.0])]).sort().values


def dense_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a weight, which is nf4 if its dtype is not floating-point."""
    if weight.is_floating_point():
        return tuple(weight.shape)
    length = weight.shape[1]
    if weight.dtype == torch.uint8:
        return len(weight), length // row_bytes(BLOCK, "nf4") * BLOCK
    whole, rest = divmod(length - 16, 33 * SCALES + 4)
    return len(weight), (whole * SCALES + rest // 33) * BLOCK


def scale_table(weight: torch.Tensor) -> torch.Tensor:
    """Return what double quantization keeps of each block of a whole tensor [O, I], as float32 [O, I / 16].

    A block has four columns: its code, its index in 256 blocks, the mean of all scales, and the scale of the
    256 blocks. The mean is summed in one thread of a CPU, because the order of a sum changes its bits.
    """
    scales = weight.detach().cpu().reshape(-1, BLOCK).abs().amax(-1).float()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    mean = scales.mean()
    torch.set_num_threads(threads)
    differences = F.pad(scales - mean, (0, -len(scales) % SCALES)).view(-1, SCALES)
    largest = differences.abs().amax(-1, keepdim=True)
    levels = _tables(scales.device).scales
    codes = torch.bucketize(differences * (1 / largest.clamp(min=_SMALLEST)), (levels[:-1] + levels[1:]) / 2)
    parts = torch.broadcast_tensors(codes.float(), torch.arange(256.0), mean, largest)
    return torch.stack(parts, -1).view(-1, 4)[: len(scales)].reshape(len(weight), -1).to(weight.device)


def quantize(weight: torch.Tensor, table: torch.Tensor | None = None) -> torch.Tensor:
    """Return a weight [O, I] as nf4 bytes; doubly quantized if its part of a `scale_table` is given."""
    rows, columns = weight.shape
    packed = weight.new_empty(rows, row_bytes(columns, "nf4"), dtype=torch.uint8)
    bounds, half, step = _tables(weight.device).bounds, columns // 2, max(1, _PIECE // columns)
    for values, result in zip(weight.split(step), packed.split(step), strict=True):
        blocks = values.float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        shares = (blocks * (1 / scales.clamp(min=_SMALLEST)).unsqueeze(-1)).clamp_(-1, 1)
        codes = torch.bucketize(shares.flatten(1), bounds, out_int32=True).to(torch.uint8)
        result[:, :half] = (codes[:, ::2] << 4) | codes[:, 1::2]
        result[:, half:] = scales.view(torch.uint8)
    if table is None:
        return packed
    codes, index, mean, scales = table.view(rows, columns // BLOCK, 4).unbind(-1)
    count = columns // BLOCK
    firsts = torch.arange(count // SCALES + 2, device=table.device) * SCALES - index[:, :1].long()
    scales = scales.gather(1, firsts.clamp(0, count - 1))
    tables = torch.cat([index[:, :1], mean[:, :1], scales], 1).contiguous()
    return torch.cat([packed[:, :half], codes.byte(), tables.view(torch.uint8)], 1).view(torch.int8)


def write(target: torch.Tensor, values: torch.Tensor, scales: Callable[[], torch.Tensor]) -> None:
    """Write values [O, I] into a weight, dense or nf4.

    Args:
        scales: returns the weight's part of the `scale_table`; called only for double quantization.
    """
    if not target.is_floating_point():
        values = quantize(values, scales() if target.dtype == torch.int8 else None)
    target.copy_(values)


def rounded(weight: torch.Tensor, format: BaseFormat) -> torch.Tensor:
    """Return the values that a whole weight [O, I] has in a format."""
    table = scale_table(weight) if format == "nf4-double" else None
    return dequantize(quantize(weight, table), weight.dtype)


def _scales_of(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the scale of each block of a weight [O, columns] as float32 [O, columns / 64]."""
    count, rest = columns // BLOCK, packed.view(torch.uint8)[:, columns // 2 :]
    if packed.dtype == torch.uint8:
        return rest.view(torch.float32)
    tables = rest[:, count:].contiguous().view(torch.float32)
    first, mean, scales = tables[:, :1].long(), tables[:, 1:2], tables[:, 2:]
    place = (first + torch.arange(count, device=packed.device)) // SCALES
    return _tables(packed.device).scales[rest[:, :count].int()] * scales.gather(1, place) + mean


def dequantize(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [O, I] of nf4 bytes: level times scale in float32, rounded once.

    On CUDA a Triton kernel gives the same bits as torch.
    """
    rows, columns = dense_shape(packed)
    weight, tables = packed.new_empty(rows, columns, dtype=dtype), _tables(packed.device)
    if packed.is_cuda:
        from patch.model.kernels import fused  # only CUDA builds of torch have Triton

        fused.dequantize_nf4(packed.view(torch.uint8), _scales_of(packed, columns), tables.levels, weight)
        return weight
    half, step = columns // 2, max(1, _PIECE // columns)
    for part, result in zip(packed.split(step), weight.split(step), strict=True):
        codes, scales = part.view(torch.uint8)[:, :half], _scales_of(part, columns).unsqueeze(-1)
        shares = tables.pairs.index_select(0, codes.flatten().int()).view(torch.float32)
        torch.mul(shares.view(len(part), -1, BLOCK), scales, out=result.view(len(part), -1, BLOCK))
    return weight


def independent_of_layout(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight, dense or nf4, in a form that is equal at every layout.

    With double quantization each rank repeats scales in its bytes, so the weight is dequantized.
    """
    return dequantize(weight, torch.float32) if weight.dtype == torch.int8 else weight


class Nf4Product(Product):
    """The plain product with an nf4 weight, which has no gradient."""

    def __init__(self, format: BaseFormat) -> None:
        self.format = format

    def of(self, weight: torch.nn.Parameter | None) -> Self:
        """Return the product of one layer; the memory of its weight becomes nf4 memory."""
        assert weight is not None, "an nf4 product needs a layer that owns its weight"
        weight.requires_grad_(False)
        rows, columns = weight.shape
        assert columns % BLOCK == 0, "the rules refuse it"
        dtype = torch.uint8 if self.format == "nf4" else torch.int8
        weight.data = weight.new_empty(rows, row_bytes(columns, self.format), dtype=dtype)
        return self

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor, messages: TPCollectives, *, keeps: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See Product; nothing is saved for backward."""
        return super().forward(input, dequantize(weight, input.dtype), messages, keeps=keeps)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input [M, I]."""
        return gradient @ dequantize(weight, gradient.dtype)
