"""Weights in 4 bits beside adapters (QLoRA, arXiv:2305.14314): NF4 as bitsandbytes makes it.

A block is 64 values of a row. Rows hold whole blocks, so blocks are those of the whole Hugging Face tensor in
row-major order, whatever rows and blocks of columns a rank has. A weight [O, I] is kept as bytes
[O, I / 2 + I / 16]:

    codes     I / 2     two values a byte, the first one in its high half
    scales    I / 16    a float32 for each block: the largest of its absolute values

A product makes the weight dense for itself alone, and backward does again. `dequantize` is the one place that
makes numbers of codes: in torch's arithmetic, on CUDA in one kernel of Triton with the same bits.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Self

import torch

from patch.families.adapters import BLOCK, packed_bytes
from patch.model.linear import Messages, Product

_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023,
    1.0,
)  # fmt: skip
"""The value of each code, as a share of its block's scale: normal quantiles (appendix E)."""
_SMALLEST = 1e-38
"""In the place of smaller scales, for a division."""
_PIECE = 2**22
"""Values that are worked on at a time: what is made of them takes up to 16 bytes each."""


class _Tables(NamedTuple):
    """The levels on a device, as the two directions need them."""

    levels: torch.Tensor
    """[16] float32."""
    bounds: torch.Tensor
    """[15] float32: where the code of a value becomes the next one."""
    pairs: torch.Tensor
    """[256] int64, each two float32: what the two codes of a byte stand for."""


@cache
def _tables(device: torch.device) -> _Tables:
    levels = torch.tensor(_LEVELS, device=device)
    pairs = torch.cartesian_prod(levels, levels).view(torch.int64).flatten()
    return _Tables(levels, (levels[:-1] + levels[1:]) / 2, pairs)


def dense_shape(weight: torch.Tensor) -> tuple[int, ...]:
    """The shape of a weight; it is in 4 bits if it has no floating-point numbers."""
    if weight.is_floating_point():
        return tuple(weight.shape)
    return len(weight), weight.shape[1] // packed_bytes(BLOCK) * BLOCK


def quantize(weight: torch.Tensor) -> torch.Tensor:
    """The bytes of a weight [O, I]."""
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
    """The weight [O, I] that bytes stand for: level times scale in float32, rounded once."""
    rows, columns = dense_shape(packed)
    weight, tables = packed.new_empty(rows, columns, dtype=dtype), _tables(packed.device)
    if packed.is_cuda:
        # Imported here, because only torch's CUDA builds come with Triton.
        from patch.model.kernels import fused

        fused.dequantize_nf4(packed, tables.levels, weight)
        return weight
    half, step = columns // 2, max(1, _PIECE // columns)
    for part, result in zip(packed.split(step), weight.split(step), strict=True):
        shares = tables.pairs.index_select(0, part[:, :half].flatten().int()).view(torch.float32)
        scales = part[:, half:].view(torch.float32).unsqueeze(-1)
        torch.mul(shares.view(len(part), -1, BLOCK), scales, out=result.view(len(part), -1, BLOCK))
    return weight


class FourBits(Product):
    """The plain product with a weight in 4 bits, which has no gradient."""

    def of(self, weight: torch.nn.Parameter | None) -> Self:
        """The product of one layer, whose new weight gets the memory for 4 bits in place of its own."""
        assert weight is not None, "a weight in 4 bits belongs to its layer"
        weight.requires_grad_(False)
        rows, columns = weight.shape
        assert columns % BLOCK == 0, "the rules refuse it"
        weight.data = weight.new_empty(rows, packed_bytes(columns), dtype=torch.uint8)
        return self

    def forward(
        self, input: torch.Tensor, weight: torch.Tensor, messages: Messages, *, keeps: bool
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """See Product; nothing is kept."""
        return super().forward(input, dequantize(weight, input.dtype), messages, keeps=keeps)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[M, I]."""
        return gradient @ dequantize(weight, gradient.dtype)


FOUR_BITS = FourBits()
