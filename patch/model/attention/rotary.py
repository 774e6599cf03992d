"""RoPE frequencies of the LLaMA family, plain and with transformers' scaling types, and RoPE's table.

megatron-core's llama3 scaling hard-codes three fields
(megatron/core/models/common/embeddings/rotary_pos_embedding.py:92-99), and its YaRN has another order of
operations. So the frequencies are computed here, bitwise equal to transformers.

The table of cosines and sines is computed once per micro-batch. megatron-core instead keeps the angles of all
positions on every context-parallel rank. Its split over the ranks needs CUDA, and each layer computes cosines
and sines again.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from patch.config.schema import ModelConfig
from patch.distributed.context_group import Zigzag


class RotaryTable(torch.nn.Module):
    """Cosines and sines of this rank's tokens, in place of megatron-core's RotaryEmbedding.

    Args:
        frequencies: (D / 2,) float32, radians per position.
        factor: from `attention_factor`.
        is_polar: whether torch.polar computes cosines and sines, which gives other bits.
    """

    frequencies: torch.Tensor
    growth: tuple[float, int] | None = None
    """`llama_4_scaling_beta` and `rope_original_max_position` of queries that grow with their position."""

    def __init__(
        self, frequencies: torch.Tensor, factor: float, zigzag: Zigzag, *, is_polar: bool = False
    ) -> None:
        super().__init__()
        self._factor = factor
        self.register_buffer("frequencies", frequencies, persistent=False)
        self._zigzag, self._is_polar = zigzag, is_polar
        self.second: RotaryTable | None = None
        """Another table, which is stacked behind this one; `Turns` says which of them a layer uses."""

    def forward(self, length: int) -> torch.Tensor:
        """Return the table of rows of one sequence of `length` tokens: [2, S / CP, 1, 1, D / 2] float32.

        With a second table it is [2, 2, S / CP, 1, 1, D / 2].
        """
        positions = torch.arange(length, device=self.frequencies.device)
        return self.at(self._zigzag.cut(positions, 0)[:, None])

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the table [2, s, B, 1, D / 2] of tokens at positions [s, B]."""
        angles = positions[..., None, None].float() * self.frequencies
        parts = angles.cos(), angles.sin()
        if self._is_polar:
            numbers = torch.polar(torch.ones_like(angles), angles)
            parts = numbers.real, numbers.imag
        table = torch.stack(parts) * self._factor
        if self.growth is not None:
            beta, length = self.growth
            table = table * (1 + beta * torch.log(1 + torch.floor(positions / length)))[..., None, None]
        return table if self.second is None else torch.stack((table, self.second.at(positions)))


def rotary_table(model: ModelConfig, zigzag: Zigzag, *, is_polar: bool) -> RotaryTable:
    """Return RoPE's table of a model; its second table is that of layers with the window, or of queries."""
    frequencies, factor = inverse_frequencies(model), attention_factor(model)
    table = RotaryTable(frequencies, factor, zigzag, is_polar=is_polar)
    if model.rotary_base_local is not None:
        local = replace(model, use_rope_scaling=False, rotary_base=model.rotary_base_local)
        table.second = RotaryTable(inverse_frequencies(local), 1.0, zigzag)
    elif model.llama_4_scaling_beta is not None:
        table.second = RotaryTable(frequencies, factor, zigzag)
        table.second.growth = model.llama_4_scaling_beta, model.rope_original_max_position
    return table


def inverse_frequencies(model: ModelConfig) -> torch.Tensor:
    """Return RoPE's angles in radians per position, (rotary_channels // 2,) float32 on the CPU.

    Dynamic NTK scaling depends on the sequence length. The length is `seq_length` (SEQ_LEN) for every row and
    pack of a run, also for shorter ones.

    Sources: Su et al., arXiv:2104.09864; llama3 scaling as in Meta's llama-models (apply_scaling); YaRN, Peng
    et al., arXiv:2309.00071, which also describes linear and dynamic scaling.
    """
    if not model.use_rope_scaling:
        return 1.0 / _periods(model, model.rotary_base)
    match model.rope_scaling_type:
        case "linear":
            return 1.0 / _periods(model, model.rotary_base) / model.rope_scaling_factor
        case "dynamic":
            return 1.0 / _periods(model, _dynamic_base(model))
        case "yarn":
            return _scale_yarn(_periods(model, model.rotary_base), model)
        case _:
            return _scale_llama3(1.0 / _periods(model, model.rotary_base), model)


def attention_factor(model: ModelConfig) -> float:
    """Return the factor of RoPE's cosines and sines; 1 except with YaRN."""
    if not model.use_rope_scaling or model.rope_scaling_type != "yarn":
        return 1.0
    if model.yarn_attention_factor is not None:
        return model.yarn_attention_factor
    scale = math.log(max(model.rope_scaling_factor, 1.0))
    if model.mscale and model.mscale_all_dim:
        return (0.1 * model.mscale * scale + 1.0) / (0.1 * model.mscale_all_dim * scale + 1.0)
    return 0.1 * scale + 1.0


def _periods(model: ModelConfig, base: float | torch.Tensor) -> torch.Tensor:
    """Return the positions per radian of each pair of channels."""
    exponents = torch.arange(0, model.rotary_channels, 2, dtype=torch.int64).float() / model.rotary_channels
    return base**exponents


def _dynamic_base(model: ModelConfig) -> float | torch.Tensor:
    """Return the base for `seq_length` tokens; the model's own base up to its longest sequence."""
    head, factor, longest = model.rotary_channels, model.rope_scaling_factor, model.max_position_embeddings
    if model.seq_length <= longest:
        return model.rotary_base
    # A float32 tensor, because transformers computes the base from a tensor of positions.
    length = torch.tensor(model.seq_length)
    return model.rotary_base * ((factor * length / longest) - (factor - 1)) ** (head / (head - 2))


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


def _scale_yarn(periods: torch.Tensor, model: ModelConfig) -> torch.Tensor:
    """Keep the first channels, divide the last ones by the factor, blend in between."""
    first, last = (_channel(model, turns) for turns in (model.yarn_beta_fast, model.yarn_beta_slow))
    if model.yarn_correction_range_round_to_int:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, model.rotary_channels - 1)
    width = last - first if last != first else 0.001
    channels = torch.arange(model.rotary_channels // 2, dtype=torch.float32)
    kept = 1 - ((channels - first) / width).clamp(0, 1)
    return 1.0 / (model.rope_scaling_factor * periods) * (1 - kept) + 1.0 / periods * kept


def _channel(model: ModelConfig, turns: float) -> float:
    """Return the fractional pair index that makes `turns` rotations within the original context."""
    period = model.rope_original_max_position / (turns * 2 * math.pi)
    return (model.rotary_channels * math.log(period)) / (2 * math.log(model.rotary_base))
