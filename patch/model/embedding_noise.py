"""Noise on embeddings in training (NEFTune, arXiv:2310.05914), the same in every layout.

Each number is a hash of a token's key and the channel, and keys do not depend on the layout (`with_noise` in
patch/training/step_data.py). There is no generator, so nothing has to be saved for a resume.
"""

from __future__ import annotations

from typing import Any

import torch

_ELEMENTS = 2**22
"""Elements whose noise is computed at once."""


class EmbeddingNoise:
    """Forward hook of an embedding that adds noise; it does nothing without `keys`."""

    keys: torch.Tensor | None = None
    """int64 [B, S]: a hash of each token of this CP rank. The caller sets both before each forward."""
    scales: torch.Tensor | None = None
    """float32 [B, S]: the largest noise of each token."""

    def __call__(self, embedding: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """Return [S, B, H] plus noise; with SP the TP rank's part of S."""
        if self.keys is None or self.scales is None:
            return output
        keys, scales = self.keys.t(), self.scales.t()
        if (size := len(keys) // len(output)) > 1:
            rank = embedding.tp_group.rank()
            keys, scales = keys.chunk(size)[rank], scales.chunk(size)[rank]
        return output + noise_of(keys, scales, output)


def noise_of(keys: torch.Tensor, scales: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return noise of the shape and dtype of `like` [..., H], uniform within +- `scales` [...]."""
    noise = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    channels = torch.arange(like.shape[-1], dtype=torch.int32, device=like.device)
    of_tokens = (noise.flatten(0, -2), keys.flatten(), scales.flatten())
    parts = (each.split(_ELEMENTS // len(channels) + 1) for each in of_tokens)
    for own, key, scale in zip(*parts, strict=True):
        first, second = key.contiguous().view(torch.int32).view(-1, 2, 1).unbind(1)
        drawn = _mixed(_mixed(first + channels) ^ second)
        own.copy_(drawn.float() * 2.0**-31 * scale[:, None])
    return noise


def _mixed(values: torch.Tensor) -> torch.Tensor:
    """Hash int32 in place (lowbias32 of C. Wellons' hash-prospector); the masks make shifts unsigned."""
    values ^= (values >> 16) & 0xFFFF
    values *= 0x7FEB352D
    values ^= (values >> 15) & 0x1FFFF
    values *= 0x846CA68B - 2**32
    values ^= (values >> 16) & 0xFFFF
    return values
