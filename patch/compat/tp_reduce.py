"""Defect of megatron-core on every device: an all-reduce whose result is lost.

megatron/core/tensor_parallel/mappings.py:20-33 (`_reduce`) all-reduces `input_.contiguous()` but
returns `input_`. For a non-contiguous tensor, such as the gradient of a transposed view when the
micro-batch is larger than one, the copy is reduced and the unreduced original is returned.
Delete when megatron-core returns the tensor that it reduced.
"""

import torch
from megatron.core.tensor_parallel import mappings


def _reduce(input_: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
    if group.size() == 1:
        return input_
    reduced = input_.contiguous()
    torch.distributed.all_reduce(reduced, group=group)
    return reduced


def apply() -> None:
    """Let `_reduce` return the tensor that it reduced."""
    mappings._reduce = _reduce
