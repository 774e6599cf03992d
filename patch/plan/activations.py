"""Bytes that a layer's forward keeps for its backward, for each setting of recomputation (AC)."""

from __future__ import annotations

import math

from patch.config import ModelConfig, ParallelConfig, RunConfig, TrainingConfig
from patch.config.choices import Recompute
from patch.plan.parameters import element_bytes

_FP8 = 1
_HALF = 2
_FP32 = 4


def activation_bytes(
    model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig, *, length: int, cuda: bool
) -> dict[Recompute | None, int]:
    """Bytes of one layer and one micro-batch on one rank, for each value of `recompute_granularity`.

    With `--recompute-method block`, "full" is that of the layers that are recomputed, None of the others.

    Not included: norms of heads, masks of a sliding window, the order of operations of Hugging Face
    (`--precision-align`), fp8's scales and its layers that stay in bf16, packing (a CPU may keep attention's
    result twice), and what backward itself allocates (with `full`, all of a block of layers).

    Args:
        model: the model's shape.
        parallel: how a layer is split over ranks.
        training: precision and micro-batch size.
        length: tokens of one sample.
        cuda: whether the layer runs on a GPU. On a CPU torch's norm consists of several operations in fp32,
            which keep two more values for each element.
    """
    tp_size = parallel.tensor_model_parallel_size
    size = element_bytes(training.precision)
    hidden = _own_hidden(model, parallel)
    norm = _norm_bytes(hidden, size, cuda=cuda)
    is_norm_recomputed = cuda or size == _HALF
    attention = _attention_bytes(model, parallel, size)
    gate_up = size * 2 * model.ffn_hidden_size // tp_size
    layers_of_block = training.recompute_num_layers if training.recompute_method == "uniform" else 1
    activation = gate_up // 2  # the product of silu(gate) and up
    narrowed = 0
    if training.precision == "fp8":
        # Three products keep their inputs in 8 bits: both norms' outputs, and the MLP's product.
        narrowed = (size - _FP8) * (2 * hidden + model.ffn_hidden_size // tp_size)
    per_token: dict[Recompute | None, float] = {
        None: 2 * norm + attention + gate_up + activation - narrowed,
        "selective": 2 * (hidden * size if is_norm_recomputed else norm) + attention + gate_up,
        "full": hidden * size / layers_of_block,
    }
    num_tokens = training.micro_batch_size * length // parallel.context_parallel_size
    return {setting: int(num_tokens * num_bytes) for setting, num_bytes in per_token.items()}


def final_norm_bytes(
    model: ModelConfig, parallel: ParallelConfig, training: TrainingConfig, *, length: int, cuda: bool
) -> int:
    """Bytes that the norm after the last layer keeps of one micro-batch on one rank, without its output.

    Args:
        model, parallel, training, length, cuda: see `activation_bytes`.
    """
    size = element_bytes(training.precision)
    hidden = _own_hidden(model, parallel)
    num_tokens = training.micro_batch_size * length // parallel.context_parallel_size
    return num_tokens * (_norm_bytes(hidden, size, cuda=cuda) - hidden * size)


def rope_table_bytes(config: RunConfig) -> int:
    """Cosines and sines of one micro-batch, which a stage's layers share; packed rows have their own."""
    rows = config.training.micro_batch_size if config.data.packing else 1
    return (
        _FP32
        * rows
        * config.sample_length
        // config.parallel.context_parallel_size
        * config.model.kv_channels
    )


def _own_hidden(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Hidden values of a token on one rank, averaged: SP cuts the tokens of what is outside of products."""
    return model.hidden_size // (parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1)


def _norm_bytes(hidden: int, size: int, *, cuda: bool) -> int:
    """Bytes of one token: a norm's input, its output and a sum; on a CPU also two fp32 values."""
    return hidden * (2 * size if cuda else 2 * _FP32 + size) + _FP32


def _attention_bytes(model: ModelConfig, parallel: ParallelConfig, size: int) -> int:
    """Bytes of one token: q and k after RoPE, v, the result and its fp32 sum.

    Norms of heads keep more. A ring keeps k and v as one message; all-to-all keeps what was exchanged: q, k,
    v of whole sequences, the result, and the result of all heads.
    """
    tp_size, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = model.num_attention_heads // tp_size, model.num_query_groups // tp_size
    kept = 2 * heads + 2 * groups
    if cp_size > 1 and parallel.cp_comm_type != "p2p":
        kept = 3 * heads + 2 * math.lcm(groups, cp_size)
    return size * model.kv_channels * kept + _FP32 * heads
