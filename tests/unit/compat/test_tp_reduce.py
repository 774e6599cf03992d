"""Upstream's tensor-parallel all-reduce returns what it reduced, also for a transposed gradient."""

import torch
from distributed_runner import run_distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

from patch import compat


def run_backward(rank: int, world_size: int, is_mended: bool) -> bool:
    if is_mended:
        compat.apply(cuda=False)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    hidden_sbh = torch.zeros(3, 2, 4, requires_grad=True)
    gradient_bsh = torch.full((2, 3, 4), float(rank + 1))
    copy_to_tensor_model_parallel_region(hidden_sbh).transpose(0, 1).backward(gradient_bsh)
    return bool((hidden_sbh.grad == 3.0).all())


def test_a_transposed_gradient_is_summed_over_tensor_parallel_ranks() -> None:
    assert run_distributed(run_backward, 2, True) == [True, True]


def test_upstream_alone_still_loses_it() -> None:
    """When this fails, upstream has mended it: delete compat/tp_reduce.py."""
    assert run_distributed(run_backward, 2, False) == [False, False]
