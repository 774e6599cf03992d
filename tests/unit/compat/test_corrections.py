"""What upstream gets wrong, with compat and without; when upstream alone is right, an entry can go."""

import math

import pytest
import torch
from distributed_runner import run_distributed
from megatron.core import parallel_state
from megatron.core.tensor_parallel import CheckpointWithoutOutput, copy_to_tensor_model_parallel_region

from patch.compat import corrections, cpu


def sum_a_transposed_gradient(rank: int) -> list[float]:
    """The gradient, over two tensor-parallel ranks of one and two, of a region's input."""
    hidden_sbh = torch.zeros(3, 2, 4, requires_grad=True)
    gradient_bsh = torch.full((2, 3, 4), float(rank + 1))
    copy_to_tensor_model_parallel_region(hidden_sbh).transpose(0, 1).backward(gradient_bsh)
    assert hidden_sbh.grad is not None
    return hidden_sbh.grad.unique().tolist()


def recompute() -> list[float] | str:
    """The gradient of what is recomputed, where Transformer Engine or its GPU is missing; or the error."""
    hidden = torch.ones(3, requires_grad=True)
    recomputed = CheckpointWithoutOutput()
    try:
        exponential = recomputed.checkpoint(torch.exp, hidden)
        total = (exponential * torch.arange(3)).sum()
        recomputed.discard_output_and_register_recompute(total)
        assert not exponential.untyped_storage().nbytes()
        total.backward()
    except Exception as error:  # noqa: BLE001 - of Transformer Engine or of CUDA
        return str(error)
    assert hidden.grad is not None
    return hidden.grad.tolist()


def run_backward(rank: int, world_size: int, is_corrected: bool) -> tuple[list[float], list[float] | str]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    if is_corrected:
        corrections.apply()
        corrections.apply()
    cpu.apply()
    return sum_a_transposed_gradient(rank), recompute()


def test_gradients_are_summed_and_recomputed() -> None:
    for summed, recomputed in run_distributed(run_backward, 2, True):
        assert summed == [3.0]
        assert recomputed == pytest.approx([0.0, math.e, 2 * math.e])


def test_upstream_alone_still_loses_the_sum_and_asks_for_transformer_engine() -> None:
    """When this fails, upstream has mended it: delete `_reduce`, or `_init`, in compat/corrections.py."""
    for rank, (summed, said) in enumerate(run_distributed(run_backward, 2, False)):
        assert summed == [rank + 1.0]
        assert isinstance(said, str) and ("FP8GlobalStateManager" in said or "CUDA" in said)
