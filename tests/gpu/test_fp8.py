"""8-bit products on a GPU: those of the CPU, and whole steps beside bf16's."""

import pytest
import torch
from megatron.core import parallel_state
from small_runs import small_run
from training_runs import build_seeded_run

from patch.config.execution import Fp8
from patch.device import DeviceContext
from patch.model.fp8_linear import Fp8Product
from patch.model.fp8_weights import StepWeights
from patch.training.step import train_step

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device with 8-bit products",
)

RESULT_BOUND = 0.01
"""Relative to the largest number: Hopper's forward sums with fewer bits, and results are bfloat16."""
LOSS_BOUND = 0.05
"""On losses near 5.6 over five steps; on the CPU fp8 is within 0.016 of bf16."""
SETTINGS = [Fp8(format=f, recipe=r) for f in ("hybrid", "e4m3") for r in ("tensorwise", "rowwise")]


def results(fp8: Fp8, device: str) -> list[torch.Tensor]:
    """Output and both gradients of a layer; the tokens are no multiple of 16."""
    torch.manual_seed(0)
    x, w, g = (
        torch.randn(*shape).bfloat16().to(device) for shape in ((75, 3, 256), (512, 256), (75, 3, 512))
    )
    x.requires_grad_(), w.requires_grad_()
    step = StepWeights(rowwise=fp8.recipe == "rowwise", keeps_values=True)
    with step.unchanged():
        output = Fp8Product(fp8, keeps_input=False, weight=step.new())(x, w)
        output.backward(g)
    return [tensor.detach().float().cpu() for tensor in (output, x.grad, w.grad)]


@pytest.mark.parametrize("fp8", SETTINGS, ids=lambda fp8: f"{fp8.format}-{fp8.recipe}")
def test_products_are_those_of_the_cpu(fp8: Fp8) -> None:
    for ours, theirs in zip(results(fp8, "cuda"), results(fp8, "cpu"), strict=True):
        assert (ours - theirs).abs().max() <= RESULT_BOUND * theirs.abs().max()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_steps_are_close_to_those_of_bf16(job: DeviceContext, recipe: str) -> None:
    losses = {}
    for name, changes in {"bf16": {}, "fp8": {"fp8_recipe": recipe}}.items():
        run = build_seeded_run(small_run(precision=name, **changes), None, job)
        losses[name] = [train_step(run, iteration).loss for iteration in range(5)]
        run.optimizer.finish_param_sync()
        parallel_state.destroy_model_parallel()
    assert losses["fp8"] == pytest.approx(losses["bf16"], abs=LOSS_BOUND)
