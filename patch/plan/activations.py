"""Bytes that a layer's forward keeps for its backward, by how much is recomputed (AC)."""

from __future__ import annotations

from patch.config import RunConfig
from patch.config.choices import Recompute

_HALF = 2
_FP32 = 4


def activation_bytes(config: RunConfig, *, cuda: bool) -> dict[Recompute | None, int]:
    """Of one layer and one micro-batch on one rank, for each value of `recompute_granularity`.

    Norms of heads, a window's masks and Hugging Face's order of operations (`--precision-align`) are left
    out. What backward itself allocates comes on top, with `full` all of a block of layers.

    Args:
        cuda: on a CPU torch's norm is several operations in fp32, which keep two more values an element.
    """
    training, tp_size = config.training, config.parallel.tensor_model_parallel_size
    size = _FP32 if training.precision == "fp32" else _HALF
    hidden = config.model.hidden_size
    if config.parallel.sequence_parallel:
        hidden //= tp_size
    norm = hidden * (2 * size if cuda else 2 * _FP32 + size) + _FP32
    is_norm_recomputed = cuda or size == _HALF
    attention, gate_up = _attention_bytes(config, size), size * 2 * config.model.ffn_hidden_size // tp_size
    activation = 3 * gate_up // 2  # silu(gate), the summand of up, their product
    per_token: dict[Recompute | None, float] = {
        None: 2 * norm + attention + gate_up + activation,
        "selective": 2 * (hidden * size if is_norm_recomputed else norm) + attention + gate_up,
        "full": hidden * size / training.recompute_num_layers,
    }
    num_tokens = training.micro_batch_size * config.sample_length
    return {setting: int(num_tokens * held) for setting, held in per_token.items()}


def _attention_bytes(config: RunConfig, size: int) -> int:
    """For one token: q, k, v in one, q and k after RoPE, the result and its fp32 sum, RoPE's four factors."""
    model, tp_size = config.model, config.parallel.tensor_model_parallel_size
    heads, groups, channels = model.num_attention_heads, model.num_query_groups, model.kv_channels
    cut = size * channels * (3 * heads + 3 * groups) + _FP32 * heads
    return cut // tp_size + 4 * size * channels // config.training.micro_batch_size
