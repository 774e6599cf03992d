"""Weights from fp32 masters; those in bf16 are rounded in the one way used everywhere.

The bits are (master + 0x8000) >> 16: to nearest, halves away from zero. Unlike torch's halves-to-even
this can be undone from the 16 bits dropped, which a later split master relies on.
"""

import torch


@torch.no_grad()
def round_weights(masters: torch.Tensor, weights: torch.Tensor) -> None:
    """Write bf16 or fp16 `weights` from float32 `masters` of the same shape."""
    if weights.dtype == torch.bfloat16:
        round_to_bf16(masters, weights)
    else:
        weights.copy_(masters)


@torch.no_grad()
def round_to_bf16(masters: torch.Tensor, weights: torch.Tensor) -> None:
    """Write bfloat16 `weights` from float32 `masters` of the same shape; NaN stays NaN."""
    bits = masters.view(torch.int32)
    weights.view(torch.int16).copy_((bits + 0x8000) >> 16)
    weights.masked_fill_(masters.isnan(), float("nan"))
