"""Arithmetic that the plan, the model and the optimizer share. Imports neither torch nor megatron."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

_LEAST_CHUNK_BYTES = 2**26
"""Bytes of float32 logits: enough for efficient products."""
_LEAST_CUDA_CHUNK = 2048
"""c tokens are 2 c V H FLOPs for a float32 sum of V H numbers that is read and written, c / 4 for each byte.
An H100 has 989.5 TFLOP/s and 3.35 TB/s, 295 FLOPs a byte: 1024 tokens would wait for its memory."""


def chunk_length(vocab_rows: int, hidden_size: int, *, cuda: bool = False) -> int:
    """Tokens of the loss that are computed at once.

    Their float32 logits have `_LEAST_CHUNK_BYTES`, or a quarter of the weight's bytes in float32, if that is
    more: each chunk is added to the weight's gradient, which must be cheap against the products. On a GPU
    there are at least `_LEAST_CUDA_CHUNK`.

    Args:
        vocab_rows: rows of the padded vocabulary on one TP rank.
        hidden_size: width of the hidden states.
        cuda: whether a GPU computes them.
    """
    least = _LEAST_CUDA_CHUNK if cuda else 1
    return max(least, max(_LEAST_CHUNK_BYTES // 4, vocab_rows * hidden_size // 4) // vocab_rows)


def apart(axes: Mapping[str, int], axis: str) -> int:
    """By how many ranks two neighbours along an axis differ.

    Args:
        axes: their sizes, the fastest first.
        axis: one of them.
    """
    names = [*axes]
    return math.prod(axes[name] for name in names[: names.index(axis)])


def groups_along(axes: Mapping[str, int], axis: str) -> Iterator[range]:
    """The groups of ranks that differ in their places along an axis only, by their first ranks.

    Source: megatron-core's RankGenerator.
    """
    step = apart(axes, axis)
    length = step * axes[axis]
    for begin in range(0, math.prod(axes.values()), length):
        yield from (range(first, begin + length, step) for first in range(begin, begin + step))
