"""FLOPs of training, and the peak FLOP/s of GPUs: numerator and denominator of MFU and HFU.

Only matrix products count; a multiply-add is 2 FLOPs; backward costs twice the forward; the output layer
counts the padded vocabulary. Frozen weights have no gradient, so their backward costs one forward. Attention
counts the pairs of tokens that attend to each other: causal, within the window, within each packed sequence.
(Megatron-LM's `num_floating_point_operations` counts half of the square, half a diagonal less; PaLM, arXiv
2204.02311, appendix B, the whole square.) Model FLOPs exclude recomputation, hardware FLOPs include it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from patch.config import ModelConfig, RunConfig
from patch.config.choices import PRECISIONS, Precision, objective_traits
from patch.families import layer_matrices, layers_with_window
from patch.families.weights import TIED_OUTPUT
from patch.layout.pipeline_stages import stage_activations
from patch.plan.parameters import (
    active_elements,
    by_layer,
    elements_of,
    layer_rows,
    rows_that_train,
    trained_share,
)

_PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("B200", 2250.0), ("H100 PCIe", 756.0), ("H100 NVL", 835.5), ("H200 NVL", 835.5), ("H200", 989.5),
    ("GH200", 989.5), ("H100", 989.5), ("H800", 989.5), ("H20", 148.0), ("A100", 312.0), ("A800", 312.0),
    ("A30", 165.0), ("A40", 149.7), ("A10", 125.0), ("L40S", 362.0), ("L40", 181.0), ("L4", 121.0),
)  # fmt: skip
"""Dense bf16 tensor-core peaks from NVIDIA's data sheets; longer names come before their shorter forms."""


class StepFlops(NamedTuple):
    """FLOPs of one optimizer step over all ranks; padding of samples counts."""

    model: float
    """FLOPs of the model's forward and backward, for MFU."""
    hardware: float
    """Computed FLOPs, with the forwards that `AC` repeats and the one that begins a step, for HFU."""


def flops_per_step(config: RunConfig, pairs: float | None = None) -> StepFlops:
    """Return the FLOPs of one optimizer step; packing gives `pairs`, the step's `attended_pairs`."""
    model, samples = config.model, config.training.global_batch_size
    if pairs is None:
        pairs = samples * mean_pairs([config.sample_length], model)
    tokens = samples * config.sample_length
    layers, attention = forward_of_layers(model, tokens, pairs)
    vocab_size = model.padded_vocab_size(config.parallel.tensor_model_parallel_size)
    output = 2 * vocab_size * model.hidden_size * tokens
    of_head = trained_share(config, TIED_OUTPUT)
    needed = 2 * (layers + attention + output) + attention + of_head * output
    trained = elements_of(layer_rows(rows_that_train(config)), active=True)
    needed += (3 if config.adapter.is_on else 1) * 2 * tokens * trained  # forwards count only the model
    repeated = 0.0
    if config.training.recompute_granularity == "full":
        of_layers = by_layer(config, lambda run: sum(forward_of_layers(run.model, tokens, pairs)))
        again = (each[stage_activations(len(each), config.training).computed_again] for each in of_layers)
        repeated = sum(map(sum, again)) / model.num_layers
    elif config.training.recompute_granularity == "selective" and model.precision_align is not None:
        repeated = attention
    if config.training.mlp_chunks_for_training > 1:
        repeated += 2 * tokens * elements_of(row for row in layer_matrices(model) if row.part == "mlp")
    if objective_traits(config.training.objective).begins_with_forward:
        repeated += layers + attention + output
    return StepFlops(needed, needed + repeated)


def forward_of_layers(model: ModelConfig, tokens: int, pairs: float) -> tuple[float, float]:
    """Return the FLOPs of a forward through all layers: of the products with weights, and of attention."""
    scores_and_values = 2 * 2 * channels_of_heads(model) * pairs
    return 2 * model.num_layers * active_elements(model) * tokens, model.num_layers * scores_and_values


def channels_of_heads(model: ModelConfig) -> int:
    """Return the channels of all heads: the mean of scores and values, which differ in latent attention."""
    return model.num_attention_heads * (model.kv_channels + model.value_channels) // 2


def attended_pairs(lengths: Iterable[int], window: tuple[int, int] | None) -> int:
    """Return the pairs (token, attended token), itself included, over sequences of these lengths."""
    return sum(_pairs(length, length if window is None else min(window[0] + 1, length)) for length in lengths)


def mean_pairs(lengths: Iterable[int], model: ModelConfig) -> float:
    """Return `attended_pairs` of a layer; the mean over all layers if only some have the window."""
    lengths, number = [*lengths], len(layers_with_window(model))
    if number in (0, model.num_layers):
        return attended_pairs(lengths, model.window_size if number else None)
    of_all, of_window = (attended_pairs(lengths, window) for window in (None, model.window_size))
    return of_all + (of_window - of_all) * number / model.num_layers


def _pairs(length: int, width: int) -> int:
    """Pairs of a sequence in which a token attends to the last `width` tokens; early tokens have fewer."""
    return width * length - width * (width - 1) // 2


def peak_flops(device_name: str, precision: Precision = "bf16") -> float | None:
    """Return the dense FLOP/s of a GPU by its driver's name for it, or None if unknown; MFU is then null.

    It is the peak of the layers' products, although attention runs in bf16; for fp32 and fp16 bf16's peak.
    """
    words = device_name.replace("-", " ").split()
    for name, tflops in _PEAK_TFLOPS:
        if all(word in words for word in name.split()):
            return tflops * 1e12 * PRECISIONS[precision].peak_factor
    return None
