"""Arithmetic that the plan, the model and the optimizer share. Imports neither torch nor megatron."""

from __future__ import annotations

_LEAST_CHUNK_BYTES = 2**26
"""Bytes of float32 logits: enough for efficient products."""


def chunk_length(vocab_rows: int, hidden_size: int) -> int:
    """Tokens of the loss that are computed at once.

    Their float32 logits have `_LEAST_CHUNK_BYTES`, or a quarter of the weight's bytes in float32, if that is
    more: each chunk is added to the weight's gradient, which must be cheap against the products.

    Args:
        vocab_rows: rows of the padded vocabulary on one TP rank.
        hidden_size: width of the hidden states.
    """
    return max(1, max(_LEAST_CHUNK_BYTES // 4, vocab_rows * hidden_size // 4) // vocab_rows)
