"""Arithmetic that the plan, the model and the optimizer share. Imports neither torch nor megatron."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

_LEAST_CHUNK_BYTES = 2**26
"""Bytes of float32 logits that are enough for efficient matrix products."""
_LEAST_CUDA_CHUNK = 2048
"""A chunk of c tokens costs 2 c V H FLOPs, and a read and write of the float32 sum of V H numbers: c / 4
FLOPs per byte. An H100 (989.5 TFLOP/s, 3.35 TB/s) needs 295 FLOPs per byte: 1024 tokens would be
memory-bound."""


def chunk_length(vocab_rows: int, hidden_size: int, *, cuda: bool = False) -> int:
    """Return the number of tokens of one chunk of the loss.

    The float32 logits of a chunk have `_LEAST_CHUNK_BYTES`, or a quarter of the bytes of the float32 weight
    if that is more. Each chunk is added to the weight's gradient, which must be cheap against the products.
    On a GPU a chunk has at least `_LEAST_CUDA_CHUNK` tokens.

    Args:
        vocab_rows: rows of the padded vocabulary on one TP rank.
    """
    least = _LEAST_CUDA_CHUNK if cuda else 1
    return max(least, max(_LEAST_CHUNK_BYTES // 4, vocab_rows * hidden_size // 4) // vocab_rows)


def keeps_logits(tokens: int, hidden_size: int, element_bytes: int) -> bool:
    """Return whether the gradients of all logits [T, V] are no larger than the float32 weight [V, H]."""
    return tokens * element_bytes <= 4 * hidden_size


def rank_stride(axes: Mapping[str, int], axis: str) -> int:
    """Return the difference between neighbouring ranks along an axis; the fastest axis comes first."""
    names = [*axes]
    return math.prod(axes[name] for name in names[: names.index(axis)])


def groups_along(axes: Mapping[str, int], axis: str) -> Iterator[range]:
    """Yield the groups of ranks that differ only along an axis, ordered by their first ranks.

    Source: megatron-core's RankGenerator.
    """
    step = rank_stride(axes, axis)
    length = step * axes[axis]
    for begin in range(0, math.prod(axes.values()), length):
        yield from (range(first, begin + length, step) for first in range(begin, begin + step))
