"""Warnings of torch about names that megatron-core uses and a user cannot change.

megatron/core/dist_checkpointing/strategies/torch.py:138 uses torch's deprecated ShardedTensor, which would
warn at every save; tensor_parallel/mappings.py uses collectives that torch 2.13 renamed. Delete when
megatron-core uses the new names.
"""

from __future__ import annotations

import warnings

_MESSAGES = (
    "Please use DTensor instead",
    r"`torch\.distributed\.\w+_tensor` is deprecated",
)


def apply() -> None:
    """Ignore these warnings."""
    for message in _MESSAGES:
        warnings.filterwarnings("ignore", message, FutureWarning)
