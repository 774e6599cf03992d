"""NF4 weights under adapters (arXiv:2305.14314), in the format of bitsandbytes.

A block is 64 values of a row. A row holds whole blocks, so the blocks of a TP shard are blocks of the full
Hugging Face tensor in row-major order. A weight [O, I] is stored as bytes [O, I / 2 + I / 16]:

    codes     I / 2     two values a byte, the first value in the high half
    scales    I / 16    a float32 per block: the largest absolute value of the block

Forward and backward each dequantize the weight and free the dense copy after the product.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Self

import torch

from patch.families.adapters import BLOCK, packed_bytes
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


@cache
def _tables(device: torch.device) -> _Tables:
    levels = torch.tensor(_LEVELS, device=device)
    pairs = torch.cartesian_prod(levels, levels).view(torch.int64).flatten()
    return _Tables(levels, (levels[:-1] + levels[1:]) / 2, pairs)


def dense_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of a weight, which is nf4 if its dtype is not floating-point."""
    if weight.is_floating_point():
        return tuple(weight.shape)
    return len(weight), weight.shape[1] // packed_bytes(BLOCK) * BLOCK


def quantize(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight [O, I] as nf4 bytes."""
    rows, columns = weight.shape
    packed = weight.new_empty(rows, packed_bytes(columns), dtype=torch.uint8)
    bounds, half, step = _tables(weight.device).bounds, columns // 2, max(1, _PIECE // columns)
    for values, result in zip(weight.split(step), packed.split(step), strict=True):
        blocks = values.float().unflatten(1, (-1, BLOCK))
        scales = blocks.abs().amax(-1)
        shares = (blocks * (1 / scales.clamp(min=_SMALLEST)).unsqueeze(-1)).clamp_(-1, 1)
        codes = torch.bucketize(shares.flatten(1), bounds, out_int32=True).to(torch.uint8)
        result[:, :half] = (codes[:, ::2] << 4) | codes[:, 1::2]
        result[:, half:] = scales.view(torch.uint8)
    return packed


def dequantize(packed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the weight [O, I] of nf4 bytes: level times scale in float32, rounded once.

    On CUDA a Triton kernel gives the same bits as torch.
    """
    rows, columns = dense_shape(packed)
    weight, tables = packed.new_empty(rows, columns, dtype=dtype), _tables(packed.device)
    if packed.is_cuda:
        from patch.model.kernels import fused  # only CUDA builds of torch have Triton

        fused.dequantize_nf4(packed, tables.levels, weight)
        return weight
    half, step = columns // 2, max(1, _PIECE // columns)
    for part, result in zip(packed.split(step), weight.split(step), strict=True):
        shares = tables.pairs.index_select(0, part[:, :half].flatten().int()).view(torch.float32)
        scales = part[:, half:].view(torch.float32).unsqueeze(-1)
        torch.mul(shares.view(len(part), -1, BLOCK), scales, out=result.view(len(part), -1, BLOCK))
    return weight


class Nf4Product(Product):
    """The plain product with an nf4 weight, which has no gradient."""

    def of(self, weight: torch.nn.Parameter | None) -> Self:
        """Return the product of one layer; the memory of its weight becomes nf4 memory."""
        assert weight is not None, "an nf4 product needs a layer that owns its weight"
        weight.requires_grad_(False)
        rows, columns = weight.shape
        assert columns % BLOCK == 0, "the rules refuse it"
        weight.data = weight.new_empty(rows, packed_bytes(columns), dtype=torch.uint8)
        return self

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor, messages: TPCollectives, *, keeps: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See Product; nothing is saved for backward."""
        return super().forward(input, dequantize(weight, input.dtype), messages, keeps=keeps)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input [M, I]."""
        return gradient @ dequantize(weight, gradient.dtype)


NF4_PRODUCT = Nf4Product()
