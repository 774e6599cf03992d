"""RoPE frequencies of the LLaMA family, with all four fields of llama3 scaling.

Upstream's llama3 scaling has three of the fields hard-coded
(megatron/core/models/common/embeddings/rotary_pos_embedding.py:92-99), so the frequencies are computed here
and set in upstream's RotaryEmbedding, which does the rest.
"""

from __future__ import annotations

import math

import torch

from patch.config.schema import ModelConfig


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """The angle in radians by which RoPE rotates each pair of channels from one position to the next.

    Returns:
        (kv_channels // 2,) float32 on the CPU, bitwise equal to transformers'.
    Source: Su et al., arXiv:2104.09864; llama3 scaling as in Meta's llama-models (apply_scaling).
    """
    exponents = torch.arange(0, model.kv_channels, 2, dtype=torch.int64).float() / model.kv_channels
    frequencies = 1.0 / (model.rotary_base**exponents)
    return _scale_llama3(frequencies, model) if model.use_rope_scaling else frequencies


def _scale_llama3(frequencies: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Keep short wavelengths, divide long ones by the factor, blend in between."""
    low, high = model.rope_low_freq_factor, model.rope_high_freq_factor
    context = model.rope_original_max_position
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > context / low, frequencies / model.rope_scaling_factor, frequencies)
    blend = (context / wavelengths - low) / (high - low)
    blended = (1 - blend) * scaled / model.rope_scaling_factor + blend * scaled
    is_between = (wavelengths >= context / high) & (wavelengths <= context / low)
    return torch.where(is_between, blended, scaled)
