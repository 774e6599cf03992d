"""Gradients that a product's epilogue adds up in float32: the kernel, and a run with and without."""

import pytest
import torch
from megatron.core import parallel_state
from small_runs import small_run
from training_runs import build_seeded_run

from patch.device import DeviceContext
from patch.model.weight_gradient import add_product, has_epilogue
from patch.training.step import train_step

LOSS_BOUND = 5e-3
"""On losses near 5.6 over five steps of bf16."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_epilogue_adds_without_rounding(dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    assert has_epilogue(device, dtype, torch.float32)
    torch.manual_seed(5)
    total, exact = torch.full((24, 40), torch.nan, device=device), torch.zeros(24, 40).double()
    for index in range(8):
        a, b = torch.randn(33, 24).to(dtype), torch.randn(33, 40).to(dtype)
        exact += a.double().t() @ b.double()
        add_product(total, a.to(device).t(), b.to(device), overwrite=index == 0)
    assert ((total.cpu().double() - exact).norm() / exact.norm()).item() < 1e-6


@pytest.mark.parametrize("stage", ["none", "optimizer", "gradients"])
def test_a_run_with_fused_sums_has_the_losses_of_one_without(job: DeviceContext, stage: str) -> None:
    losses = []
    for is_fused in (True, False):
        changes = {"precision": "bf16", "train_iters": 5, "data_parallel_sharding": stage}
        run = build_seeded_run(small_run(gradient_accumulation_fusion=is_fused, **changes), None, job)
        losses.append([train_step(run, iteration).loss for iteration in range(5)])
        run.optimizer.finish_param_sync()
        parallel_state.destroy_model_parallel()
    assert losses[0] == pytest.approx(losses[1], abs=LOSS_BOUND)
