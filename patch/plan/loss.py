"""Memory of the output layer and the loss, which are computed chunk by chunk over tokens."""

from __future__ import annotations

from typing import NamedTuple

from patch.config import RunConfig
from patch.plan.parameters import element_bytes

_LEAST_CHUNK_BYTES = 2**26
"""Bytes of float32 logits: enough for efficient products."""
_FP32 = 4


def chunk_length(vocab_rows: int, hidden_size: int) -> int:
    """Tokens of a chunk.

    Its float32 logits have `_LEAST_CHUNK_BYTES`, or a quarter of the weight's bytes in float32, if that is
    more: each chunk is added to the weight's gradient, which must be cheap against the products.

    Args:
        vocab_rows: rows of the padded vocabulary on one TP rank.
        hidden_size: width of the hidden states.
    """
    return max(1, max(_LEAST_CHUNK_BYTES // 4, vocab_rows * hidden_size // 4) // vocab_rows)


class LossBytes(NamedTuple):
    """Bytes of one micro-batch on one rank."""

    kept: int
    """The gradients of hidden states and weight, from the loss to its backward."""
    transient: int
    """A chunk of logits, and the float32 sum of the weight's gradient; until the loss is known."""


def loss_bytes(config: RunConfig, *, cuda: bool) -> LossBytes:
    """What the loss without logits needs (not `--precision-align`, which has all logits).

    Args:
        config: the run.
        cuda: whether it runs on GPUs, where Triton's kernels need no float32 copy of a chunk's logits. A CPU
            adds another type to the sum through such a copy.
    """
    training, hidden = config.training, config.model.hidden_size
    rows = config.padded_vocab_size // config.parallel.tensor_model_parallel_size
    tokens = config.micro_batch_tokens
    size = element_bytes(training.precision)
    chunk = chunk_length(rows, hidden)
    logits = min(chunk, tokens) * rows * (size if cuda or size == _FP32 else size + _FP32)
    has_sum = chunk < tokens and size != _FP32
    weight_sum = rows * hidden * _FP32 * (1 if cuda else 2) if has_sum else 0
    return LossBytes(kept=(tokens + rows) * hidden * size, transient=logits + weight_sum)
