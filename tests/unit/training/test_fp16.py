"""fp16: overflowing steps are skipped, gradients are unscaled in float32, losses follow fp32's."""

import math

import pytest
import torch
from distributed_runner import run_distributed
from small_runs import small_run
from training_runs import build_seeded_run, train

from patch.training.step import train_step


def run_fp16(rank: int, world_size: int) -> dict:
    fp16 = {"precision": "fp16", "dp": 2, "data_parallel_sharding": "optimizer"}
    return {
        "fp32": [result.loss for result in train(small_run(dp=2))],
        "fp16": [result.loss for result in train(small_run(**fp16))],
        "large": _overflowing_steps(small_run(**fp16, initial_loss_scale=2.0**30, loss_scale_window=3)),
    }


def _overflowing_steps(config: object) -> list[tuple]:
    run = build_seeded_run(config)
    history = []
    for iteration in range(20):
        run.optimizer.finish_param_sync()
        before = [weight.detach().clone() for weight in run.stages[0].parameters()]
        result = train_step(run, iteration)
        run.optimizer.finish_param_sync()
        same = all(torch.equal(a, b) for a, b in zip(before, run.stages[0].parameters(), strict=True))
        scale = run.optimizer.loss_scale.value
        history.append((result.skipped, result.grad_norm, same, scale, run.optimizer.adam.step_count))
    return history


@pytest.fixture(scope="module")
def found() -> dict:
    return run_distributed(run_fp16, 2)[0]


def test_losses_follow_fp32(found: dict) -> None:
    assert found["fp16"] == pytest.approx(found["fp32"], abs=0.02)


def test_overflow_skips_the_step_and_halves_the_scale(found: dict) -> None:
    skipped = [entry for entry in found["large"] if entry[0]]
    assert skipped and found["large"][0][0]
    assert all(same and not math.isfinite(norm) for _, norm, same, _, _ in skipped)
    num_first = [entry[0] for entry in found["large"]].index(0)
    assert [entry[3] for entry in found["large"][:num_first]] == [2.0 ** (29 - i) for i in range(num_first)]


def test_good_steps_update_by_unscaled_gradients_and_double_the_scale(found: dict) -> None:
    good = [entry for entry in found["large"] if not entry[0]]
    assert all(not same and 0.1 < norm < 10 for _, norm, same, _, _ in good)
    assert found["large"][-1][4] == len(good)
    scales = [entry[3] for entry in found["large"]]
    assert any(after == 2 * before for before, after in zip(scales, scales[1:], strict=False))
