"""Weights from fp32 masters; those in bf16 are rounded in the one way used everywhere.

The bits are (master + 0x8000) >> 16: to nearest, halves away from zero. Unlike torch's halves-to-even
this can be undone from the 16 bits dropped, which a later split master relies on.
"""

import torch

# Elements rounded at a time: temporaries of 8 bytes each stay small beside the states.
_TILE = 1 << 24


@torch.no_grad()
def round_weights(masters: torch.Tensor, weights: torch.Tensor) -> None:
    """Write bf16 or fp16 `weights` from float32 `masters` (numel,)."""
    if weights.dtype == torch.bfloat16:
        round_to_bf16(masters, weights)
    else:
        weights.copy_(masters)


@torch.no_grad()
def round_to_bf16(masters: torch.Tensor, weights: torch.Tensor) -> None:
    """Write bfloat16 `weights` from float32 `masters` (numel,); NaN stays NaN."""
    for master, weight in zip(masters.split(_TILE), weights.split(_TILE), strict=True):
        weight.view(torch.int16).copy_((master.view(torch.int32) + 0x8000) >> 16)
        weight.masked_fill_(master.isnan(), float("nan"))
