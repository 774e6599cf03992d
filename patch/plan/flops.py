"""Model FLOPs of training, and the peak FLOP/s of GPUs: numerator and denominator of MFU.

Convention (Megatron-LM's `num_floating_point_operations`): only matrix multiplications count; a multiply-add
is 2 FLOPs; the backward costs twice the forward; causal attention counts the half of the scores that is not
masked; the output layer counts the padded vocabulary; recomputation does not count. PaLM (arXiv 2204.02311,
appendix B) differs only in that it counts all scores of attention.
"""

from __future__ import annotations

from collections.abc import Iterable

from patch.config import ModelConfig, RunConfig
from patch.plan.parameters import layer_matrices

_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250.0),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H200 NVL", 835.5),
    ("H200", 989.5),
    ("GH200", 989.5),
    ("H100", 989.5),
    ("H800", 989.5),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
)
"""Dense bf16 tensor-core peaks from NVIDIA's data sheets; longer names come before their shorter forms."""


def flops_per_token(model: ModelConfig, length: int, tp_size: int) -> float:
    """FLOPs of forward and backward for one token.

    Args:
        model: the model's shape.
        length: tokens of the sequence that the token is part of.
        tp_size: tensor parallel size, on which the padding of the vocabulary depends.
    """
    query = model.num_attention_heads * model.kv_channels
    scores_and_values = 2 * query * _attended(length, model.window_size)
    per_layer = layer_matrices(model) + scores_and_values
    return 6 * (model.num_layers * per_layer + model.padded_vocab_size(tp_size) * model.hidden_size)


def _attended(length: int, window: tuple[int, int] | None) -> float:
    """Tokens that a token attends to on average: half of the sequence, fewer with a sliding window."""
    width = length if window is None else min(window[0] + 1, length)
    return width * (length - width / 2) / length


def attended_pairs(lengths: Iterable[int], window: tuple[int, int] | None) -> float:
    """Pairs of a token and one that it attends to, over sequences of these lengths."""
    return sum(length * _attended(length, window) for length in lengths)


def model_flops_per_step(config: RunConfig, pairs: float | None = None) -> float:
    """FLOPs of one optimizer step over all ranks; padding counts.

    Args:
        config: the run.
        pairs: with packing, the `attended_pairs` of the step's sequences; None: each sample is one sequence.
    """
    length, tp_size = config.sample_length, config.parallel.tensor_model_parallel_size
    tokens = config.training.global_batch_size * length
    flops = flops_per_token(config.model, length, tp_size) * tokens
    if pairs is None:
        return flops
    model = config.model
    fewer = tokens * _attended(length, model.window_size) - pairs
    return flops - 12 * model.num_layers * model.num_attention_heads * model.kv_channels * fewer


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by the name that the driver reports; None if it is not known.

    MFU is null then: it is never a guess.
    """
    words = device_name.replace("-", " ").split()
    for name, tflops in _PEAK_TFLOPS:
        if all(word in words for word in name.split()):
            return tflops * 1e12
    return None
