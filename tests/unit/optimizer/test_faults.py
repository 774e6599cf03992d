"""The faults of the original (Megatron-LLaMA's optimizer of this name): each by name, and that it is gone.

All run on two ranks. Where a fault is a race, one rank is late, so that the other still waits for it.
Tied embeddings on two stages, and states on another DP or bucket size, are tested in
tests/unit/training/test_sharding.py and test_sharded_state.py.
"""

import gc
import math
import time
import traceback
from contextlib import nullcontext
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from optimizer_runs import (
    LR,
    ZERO_STAGES,
    OddModel,
    Oracle,
    accumulate,
    assert_same_weights,
    build_optimizer,
    data_parallel_groups,
    make_steps,
    states_of,
    take_step,
)
from torch.nn.modules import module as torch_module

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.optimizer import OverlappedDistributedOptimizer

LATE_S = 0.3


class Branches(torch.nn.Module):
    """A trunk and two branches; a batch (x, name) uses one branch, or none of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = torch.nn.Linear(23, 11)
        self.left = torch.nn.Linear(11, 3)
        self.right = torch.nn.Linear(11, 3)

    def forward(self, batch: tuple[torch.Tensor, str]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(batch[0]))
        hidden = {"left": self.left, "right": self.right, "": torch.nn.Identity()}[batch[1]](hidden)
        return hidden.square().mean()


def train_branches(rank: int, zero_stage: ZeroStage, names: list[list[str]]) -> None:
    """Three steps in which micro-batch m of rank r uses branch names[r][m], like the oracle's."""
    for bucket_size in (1, 150, 10**9):
        model, oracle = Branches(), Oracle(Branches(), zero_stage)
        optimizer = build_optimizer(model, zero_stage, reduce_bucket_size=bucket_size)
        for step in make_steps(3, len(names), len(names[0])):
            named = [list(zip(*of_rank, strict=True)) for of_rank in zip(step, names, strict=True)]
            take_step(model, optimizer, named[rank])
            oracle.take_step(named)
        optimizer.finish_param_sync()
        assert_same_weights(model, oracle)


def late_step(rank: int, zero_stage: ZeroStage) -> tuple[OddModel, Any, Oracle]:
    """A model after a step that rank 1 ends late: its weights are not there yet on rank 0."""
    (step,) = make_steps(1, 2, 1)
    model, oracle = OddModel(), Oracle(OddModel(), zero_stage)
    optimizer = build_optimizer(model, zero_stage)
    accumulate(model, optimizer, step[rank])
    norm = optimizer.get_grad_norm()
    time.sleep(LATE_S * rank)
    optimizer._update(norm, LR)
    oracle.take_step(step)
    return model, optimizer, oracle


def stale_weights_in_evaluation(rank: int, zero_stage: ZeroStage) -> None:
    (((batch,),),) = make_steps(1, 1, 1, seed=9)
    model, _, oracle = late_step(rank, zero_stage)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(batch), oracle.model(batch))


def stale_weights_in_the_state_dict(rank: int, zero_stage: ZeroStage) -> None:
    model, _, oracle = late_step(rank, zero_stage)
    for name, value in model.state_dict().items():
        assert torch.equal(value, oracle.model.state_dict()[name]), name


def stale_weights_in_the_state_dict_of_a_part(rank: int, zero_stage: ZeroStage) -> None:
    model, _, oracle = late_step(rank, zero_stage)
    assert torch.equal(model.first.state_dict()["weight"], oracle.model.first.weight)


def stale_weights_for_a_raw_reader_who_waits(rank: int, zero_stage: ZeroStage) -> None:
    model, optimizer, oracle = late_step(rank, zero_stage)
    optimizer.finish_param_sync()
    assert_same_weights(model, oracle)


def loaded_weights_overwritten_by_late_ones(rank: int, zero_stage: ZeroStage) -> None:
    model, optimizer, _ = late_step(rank, zero_stage)
    model.load_state_dict(OddModel(seed=7).state_dict())
    optimizer.finish_param_sync()
    assert_same_weights(model, Oracle(OddModel(seed=7), zero_stage))


def evaluation_before_the_first_step(rank: int, zero_stage: ZeroStage) -> None:
    (((batch,),),) = make_steps(1, 1, 1)
    model = OddModel()
    build_optimizer(model, zero_stage)
    assert torch.equal(model(batch), OddModel()(batch))


def evaluation_after_iteration_1_between_steps(rank: int, zero_stage: ZeroStage) -> None:
    model, oracle = OddModel(), Oracle(OddModel(), zero_stage)
    optimizer = build_optimizer(model, zero_stage)
    for step in make_steps(3, 2, 2):
        take_step(model, optimizer, step[rank])
        oracle.take_step(step)
        with torch.no_grad():
            assert torch.equal(model(step[0][0]), oracle.model(step[0][0]))
    assert_same_weights(model, oracle)


def bucket_dropped_by_an_unused_parameter(rank: int, zero_stage: ZeroStage) -> None:
    train_branches(rank, zero_stage, [["left"], ["left"]])


def unused_parameters_that_differ_by_rank(rank: int, zero_stage: ZeroStage) -> None:
    train_branches(rank, zero_stage, [["left"], ["right"]])
    train_branches(rank, zero_stage, [["", ""], ["right", "left"]])


def unused_parameters_that_differ_by_micro_batch(rank: int, zero_stage: ZeroStage) -> None:
    train_branches(rank, zero_stage, [["left", "right", ""], ["left", "", "right"]])


def unused_parameters_that_differ_by_rank_on_interleaved_stages(rank: int, zero_stage: ZeroStage) -> None:
    """Two stages take turns; rank 0 fills all buckets of a stage at once, rank 1 leaves some to its end."""
    names = [["left", "right"], ["", "left"]]
    for bucket_size in (1, 150):
        stages, oracles = (
            [Branches(), Branches()],
            [Oracle(Branches(), zero_stage, clip_grad=0.0) for _ in range(2)],
        )
        config = OptimizerConfig(lr=LR, clip_grad=0.0, reduce_bucket_size=bucket_size)
        optimizer = OverlappedDistributedOptimizer(stages, config, zero_stage, data_parallel_groups())
        for first, second in zip(make_steps(2, 2, 2), make_steps(2, 2, 2, seed=2), strict=True):
            named = [
                [list(zip(*of, strict=True)) for of in zip(step, names, strict=True)]
                for step in (first, second)
            ]
            optimizer.zero_grad(LR)
            for index, stage in ((0, 1), (0, 0), (1, 1), (1, 0)):
                with optimizer.no_sync() if index == 0 else nullcontext():
                    loss = stages[stage](named[stage][rank][index])
                    loss.backward()
            optimizer.finish_grad_sync()
            optimizer.step()
            for oracle, batches in zip(oracles, named, strict=True):
                oracle.take_step(batches)
        optimizer.finish_param_sync()
        for stage, oracle in zip(stages, oracles, strict=True):
            assert_same_weights(stage, oracle)


def context_of_an_evaluation_that_ends_within_a_later_step(rank: int, zero_stage: ZeroStage) -> None:
    """Schedules that only run forward enter `no_sync` and never leave it."""
    model, oracle = OddModel(), Oracle(OddModel(), zero_stage)
    optimizer = build_optimizer(model, zero_stage)
    left_open = [optimizer.no_sync()]
    left_open[0].__enter__()
    (step,) = make_steps(1, 2, 3)
    optimizer.zero_grad(LR)
    for index, batch in enumerate(step[rank]):
        with optimizer.no_sync() if index < 2 else nullcontext():
            left_open.clear()
            loss = model(batch)
            loss.backward()
    optimizer.finish_grad_sync()
    optimizer.step()
    oracle.take_step(step)
    optimizer.finish_param_sync()
    assert_same_weights(model, oracle)


def weights_of_an_unused_module_still_on_their_way_when_written(rank: int, zero_stage: ZeroStage) -> None:
    model = Branches()
    optimizer = build_optimizer(model, zero_stage, reduce_bucket_size=1)
    update = optimizer.adam.update

    def guarded_update(indices: list[int]) -> None:
        assert not set(indices) & set(optimizer.param_buffer._pending), (
            f"one of {indices} is still on its way"
        )
        update(indices)

    optimizer.adam.update = guarded_update  # type: ignore[method-assign]
    for step in make_steps(3, 2, 1):
        take_step(model, optimizer, [(step[rank][0], "left")])


def hooks_that_die(rank: int, zero_stage: ZeroStage) -> None:
    model, oracle = OddModel(), Oracle(OddModel(), zero_stage)
    optimizer = build_optimizer(model, zero_stage)
    for step in make_steps(3, 2, 2):
        gc.collect()
        take_step(model, optimizer, step[rank])
        assert all(parameter.grad is None for parameter in model.parameters())
        oracle.take_step(step)
    optimizer.finish_param_sync()
    assert_same_weights(model, oracle)


def frozen_parameters_lost_or_changed(rank: int, zero_stage: ZeroStage) -> None:
    def build() -> OddModel:
        model = OddModel()
        model.first.weight.requires_grad_(False)
        model.gain.requires_grad_(False)
        return model

    model, oracle = build(), Oracle(build(), zero_stage)
    optimizer = build_optimizer(model, zero_stage)
    for step in make_steps(3, 2, 2):
        take_step(model, optimizer, step[rank])
        oracle.take_step(step)
    optimizer.finish_param_sync()
    assert set(model.state_dict()) == set(OddModel().state_dict())
    assert_same_weights(model, oracle)
    assert torch.equal(model.first.weight, OddModel().first.weight)


def one_optimizer_per_process(rank: int, zero_stage: ZeroStage) -> None:
    models = [OddModel(seed) for seed in range(3)]
    oracles = [Oracle(OddModel(seed), zero_stage) for seed in range(3)]
    optimizers = [build_optimizer(model, zero_stage) for model in models]
    for step in make_steps(3, 2, 2):
        for model, optimizer, oracle in zip(models, optimizers, oracles, strict=True):
            take_step(model, optimizer, step[rank])  # the weights of the others are on their way
            oracle.take_step(step)
    for model, optimizer, oracle in zip(models, optimizers, oracles, strict=True):
        optimizer.finish_param_sync()
        assert_same_weights(model, oracle)


def global_forward_hook_that_other_modules_meet(rank: int, zero_stage: ZeroStage) -> None:
    model, optimizer, oracle = late_step(rank, zero_stage)
    assert not torch_module._global_forward_pre_hooks and not torch_module._global_forward_hooks
    other = torch.nn.Linear(4, 4)
    assert other(torch.ones(4)).shape == (4,)
    pending = len(optimizer.param_buffer._pending)
    calls: list[str] = []
    model.first.register_forward_pre_hook(lambda module, inputs: calls.append("user's"))
    assert pending == (
        len(optimizer.grad_buffer.buckets) if optimizer.is_sharded else 0
    )  # none was waited for
    model(make_steps(1, 1, 1)[0][0][0])
    assert calls == ["user's"]
    assert_same_weights(model, oracle)


def loading_and_then_forward(rank: int, zero_stage: ZeroStage) -> None:
    (((batch,),),) = make_steps(1, 1, 1, seed=9)
    model, _, _ = late_step(rank, zero_stage)
    model.load_state_dict(OddModel(seed=7).state_dict())
    assert torch.equal(model(batch), OddModel(seed=7)(batch))


def masters_that_ignore_loaded_weights(rank: int, zero_stage: ZeroStage) -> None:
    loaded = OddModel(seed=7, dtype=torch.bfloat16)
    model = OddModel(dtype=torch.bfloat16)
    optimizer = build_optimizer(model, zero_stage)
    model.load_state_dict(loaded.state_dict())
    optimizer.reload_model_params()
    for low, _ in states_of(optimizer, "master_low"):
        assert not low.any()
    accumulate(model, optimizer, [batch.bfloat16() for batch in make_steps(1, 2, 1)[0][rank]], lr=0.0)
    optimizer.step()
    optimizer.finish_param_sync()
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
    return [*optimizer.param_buffer.flats, *states]


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
    stale_weights_in_evaluation,
    stale_weights_in_the_state_dict,
    stale_weights_in_the_state_dict_of_a_part,
    stale_weights_for_a_raw_reader_who_waits,
    loaded_weights_overwritten_by_late_ones,
    evaluation_before_the_first_step,
    evaluation_after_iteration_1_between_steps,
    bucket_dropped_by_an_unused_parameter,
    unused_parameters_that_differ_by_rank,
    unused_parameters_that_differ_by_micro_batch,
    unused_parameters_that_differ_by_rank_on_interleaved_stages,
    context_of_an_evaluation_that_ends_within_a_later_step,
    weights_of_an_unused_module_still_on_their_way_when_written,
    hooks_that_die,
    frozen_parameters_lost_or_changed,
    one_optimizer_per_process,
    global_forward_hook_that_other_modules_meet,
    loading_and_then_forward,
    masters_that_ignore_loaded_weights,
    non_finite_bf16_gradients_unseen,
    fp16_gradients_unscaled_in_fp16,
]


def run_faults(rank: int, world_size: int) -> dict[tuple[str, str], str]:
    """The failure of each fault's check at each ZeRO stage on this rank, or an empty string."""
    found = {}
    for fault, zero_stage in product(FAULTS, ZERO_STAGES):
        try:
            fault(rank, zero_stage)
            found[fault.__name__, zero_stage] = ""
        except Exception:  # noqa: BLE001 - reported by the fault's own test; the others go on
            found[fault.__name__, zero_stage] = traceback.format_exc()
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def failures() -> list[dict[tuple[str, str], str]]:
    return run_distributed(run_faults, 2)


@pytest.mark.parametrize("zero_stage", ZERO_STAGES)
@pytest.mark.parametrize("fault", [fault.__name__ for fault in FAULTS])
def test_fault_of_the_original_is_absent(failures: list, fault: str, zero_stage: ZeroStage) -> None:
    assert [rank[fault, zero_stage] for rank in failures] == ["", ""]
