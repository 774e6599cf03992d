"""Faults in the numbers of the original (Megatron-LLaMA's optimizer of this name), and that they are gone.

Its other faults are tested where their law is: stale weights in test_param_access.py, unused parameters in
test_micro_batches.py, frozen ones in test_main_grad.py, several optimizers in test_several_models.py.
"""

import math
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from optimizer_runs import (
    ZERO_STAGES,
    OddModel,
    Oracle,
    accumulate,
    build_optimizer,
    failures_of,
    make_steps,
    states_of,
    take_step,
)

from patch.config.choices import ZeroStage


def masters_that_ignore_loaded_weights(rank: int, zero_stage: ZeroStage) -> None:
    loaded = OddModel(seed=7, dtype=torch.bfloat16)
    model = OddModel(dtype=torch.bfloat16)
    optimizer = build_optimizer(model, zero_stage)
    batches = [batch.bfloat16() for batch in make_steps(1, 2, 1)[0][rank]]
    take_step(model, optimizer, batches)
    with optimizer.full_weights():
        model.load_state_dict(loaded.state_dict())
    optimizer.reload_model_params()
    for low, _ in states_of(optimizer, "master_low"):
        assert not low.any()
    accumulate(model, optimizer, batches, lr=0.0)
    optimizer.step()
    with optimizer.full_weights():
        for name, value in model.state_dict().items():  # lr 0: exactly what was loaded
            assert torch.equal(value, loaded.state_dict()[name]), name


def non_finite_bf16_gradients_unseen(rank: int, zero_stage: ZeroStage) -> None:
    for dtype, value in product(("fp32", "bf16"), (math.inf, math.nan)):
        model = OddModel(dtype=torch.bfloat16)
        optimizer = build_optimizer(model, zero_stage, main_grads_dtype=dtype)
        before = [tensor.clone() for tensor in _all_state(optimizer)]
        inputs = torch.ones(4, 23, dtype=torch.bfloat16)
        inputs[0, 0] = value if rank == 1 else 1.0
        accumulate(model, optimizer, [torch.ones(4, 23, dtype=torch.bfloat16), inputs])
        assert not math.isfinite(optimizer.get_grad_norm()), (dtype, value)
        assert all(map(torch.equal, before, _all_state(optimizer)))


def _all_state(optimizer: Any) -> list[torch.Tensor]:
    states = (state for name in optimizer.adam.dtypes for state, _ in states_of(optimizer, name))
    return [*(flat.buffer for flat in optimizer.param_buffer.flats), *states]


def fp16_gradients_unscaled_in_fp16(rank: int, zero_stage: ZeroStage) -> None:
    def build(dtype: torch.dtype) -> OddModel:
        model = OddModel(dtype=torch.float16).to(dtype)
        model.gain.data *= 2.0**-11  # gradients near 1e-9
        for parameter in (model.first.bias, model.gain, *model.last.parameters()):
            parameter.requires_grad_(False)
        return model

    model, oracle = build(torch.float16), Oracle(build(torch.float32), zero_stage)
    optimizer = build_optimizer(model, zero_stage, initial_loss_scale=2.0**14, clip_grad=0.0)
    inputs = [[batch.half() for batch in of_rank] for of_rank in make_steps(1, 2, 1)[0]]
    expected = oracle.gradients([[batch.float() for batch in of_rank] for of_rank in inputs])["first.weight"]
    assert np.abs(expected.astype(np.float16)).max() == 0.0, "fp16 could hold these gradients"
    norm = take_step(model, optimizer, inputs[rank])
    assert norm == pytest.approx(np.linalg.norm(expected), rel=0.02)
    states = [state for state, _ in states_of(optimizer, "exp_avg")]
    square = sum(exp_avg.double().square().sum() for exp_avg in states)
    if optimizer.is_sharded:
        dist.all_reduce(square)
    assert square.sqrt().item() == pytest.approx(0.1 * np.linalg.norm(expected), rel=0.02)


FAULTS = [
    masters_that_ignore_loaded_weights,
    non_finite_bf16_gradients_unseen,
    fp16_gradients_unscaled_in_fp16,
]


def run_faults(rank: int, world_size: int) -> dict[tuple[str, ZeroStage], str]:
    return failures_of(
        {(fault.__name__, zero): partial(fault, rank, zero) for fault, zero in product(FAULTS, ZERO_STAGES)}
    )


def test_faults_of_the_original_are_absent() -> None:
    for found in run_distributed(run_faults, 2):
        assert set(found.values()) == {""}, found
