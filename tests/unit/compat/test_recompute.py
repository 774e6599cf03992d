"""Upstream's recomputation without an output, where Transformer Engine or its GPU is missing."""

import math

import pytest
import torch
from distributed_runner import run_distributed
from megatron.core.tensor_parallel import CheckpointWithoutOutput

from patch.compat import cpu, recompute


def run_backward(rank: int, world_size: int, is_mended: bool) -> list[float]:
    cpu.apply()
    if is_mended:
        recompute.apply()
        recompute.apply()
    hidden = torch.ones(3, requires_grad=True)
    recomputed = CheckpointWithoutOutput()
    exponential = recomputed.checkpoint(torch.exp, hidden)
    total = (exponential * torch.arange(3)).sum()
    recomputed.discard_output_and_register_recompute(total)
    assert not exponential.untyped_storage().nbytes()
    total.backward()
    assert hidden.grad is not None
    return hidden.grad.tolist()


def test_what_is_recomputed_has_its_gradient() -> None:
    (gradient,) = run_distributed(run_backward, 1, True)
    assert gradient == pytest.approx([0.0, math.e, 2 * math.e])


def test_upstream_alone_still_asks_for_transformer_engine_and_its_gpu() -> None:
    """When this fails, upstream has mended it: delete compat/recompute.py."""
    with pytest.raises(AssertionError, match="FP8GlobalStateManager|CUDA"):
        run_distributed(run_backward, 1, False)
