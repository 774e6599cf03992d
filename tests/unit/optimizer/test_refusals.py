"""Models that cannot be trained as they are: refused by name, before anything is changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_runner import run_distributed
from optimizer_runs import LR, OddModel, build_optimizer, data_parallel_groups, make_steps, take_step

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.errors import ConfigError, TrainingError
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer import build_optimizer as from_config

EIGHT = torch.float8_e4m3fn
Change = Callable[[OddModel], Any]
AT_CONSTRUCTION: list[tuple[Change, str]] = [
    (lambda m: setattr(m.gain, "data", m.gain.data.double()), r"gain has dtype torch.float64, .*--precision"),
    (lambda m: m.double(), r"last.bias has dtype torch.float64, expected float32.*--precision"),
    (lambda m: m.last.to("meta"), r"last.bias is on the meta device, expected values"),
    (lambda m: setattr(m.last.weight, "allreduce", False), r"last.weight: an expert-parallel parameter, exp"),
]
OTHER_ARGUMENTS: list[tuple[Any, Any, str]] = [
    (torch.nn.Sequential(OddModel()), ZeroStage.NONE, r"got a module \(Sequential\), expected a list"),
    ([OddModel()], "zero2", r"got 'zero2', expected one of ZeroStage.NONE, .*ZeroStage.GRADIENTS"),
    ([OddModel()], 2, r"got 2, expected one of ZeroStage.NONE"),
]
BETWEEN_STEPS: list[tuple[Change, str]] = [
    (lambda m: m.last.weight.requires_grad_(False), r"last.weight was frozen after"),
    (lambda m: m.first.bias.requires_grad_(True), r"first.bias was unfrozen or added"),
    (lambda m: setattr(m, "extra", torch.nn.Linear(2, 2)), r"extra.weight was unfrozen or added"),
    (lambda m: delattr(m, "gain"), r"gain was removed or replaced"),
    (
        lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True),
        r"was unfrozen or added|was removed or replaced",
    ),
    (lambda m: m.half(), r"was moved to other memory"),
]


@pytest.mark.usefixtures("one_process")
def test_each_is_an_error_that_names_the_parameter() -> None:
    for change, message in AT_CONSTRUCTION:
        change(model := OddModel())
        with pytest.raises(ConfigError, match=message):
            build_optimizer(model, ZeroStage.NONE)
    for stages, stage, message in OTHER_ARGUMENTS:
        for build in (from_config, OverlappedDistributedOptimizer):
            with pytest.raises(ConfigError, match=message):
                build(stages, OptimizerConfig(lr=LR), stage, data_parallel_groups())
    _refuse_another_optimizer()
    _refuse_a_parameter_in_two_stages()
    (step,) = make_steps(1, 1, 1)
    for change, message in BETWEEN_STEPS:
        model = OddModel()
        model.first.bias.requires_grad_(False)
        optimizer = build_optimizer(model, ZeroStage.NONE)
        take_step(model, optimizer, step[0])
        optimizer.zero_grad(LR)
        change(model)
        with optimizer.full_weights():  # as a save in between does
            pass
        with pytest.raises(TrainingError, match=message):
            optimizer.zero_grad(LR)
    _train_what_is_not_contiguous()


def _refuse_another_optimizer() -> None:
    model = OddModel()
    optimizer = build_optimizer(model, ZeroStage.NONE)
    before = model.gain.data_ptr()
    with pytest.raises(ConfigError, match="another optimizer trains its parameters"):
        build_optimizer(model, ZeroStage.NONE)
    assert model.gain.data_ptr() == before
    (step,) = make_steps(1, 1, 1)
    take_step(model, optimizer, step[0])
    optimizer.finish_param_sync()
    build_optimizer(copy.deepcopy(model), ZeroStage.NONE)  # a copy belongs to no optimizer


def _refuse_a_parameter_in_two_stages() -> None:
    stages = [OddModel(), OddModel()]
    stages[1].gain = stages[0].gain
    with pytest.raises(ConfigError, match="gain is in several stages"):
        build_optimizer(stages, ZeroStage.NONE)


def _train_what_is_not_contiguous() -> None:
    """It becomes contiguous, to the same results."""
    plain, turned = OddModel(), OddModel()
    turned.first.weight.data = turned.first.weight.data.t().contiguous().t()
    assert not turned.first.weight.is_contiguous()
    for model in (plain, turned):
        optimizer = build_optimizer(model, ZeroStage.NONE)
        for step in make_steps(3, 1, 1):
            take_step(model, optimizer, step[0])
    assert torch.equal(plain.first.weight, turned.first.weight)


def _refuse_offload_and_gathers_in_8_bits(rank: int, world_size: int) -> None:
    for dtypes, gather_dtype, policy, message in (
        ((torch.float32, torch.bfloat16), None, "static",
         r"dtypes torch.bfloat16 \(last.\w+\), torch.float32 \(gain\), expected one with --optimizer-off"),
        ((torch.bfloat16,), EIGHT, "static", "got static or auto, expected false beside --fp8-param-gather"),
        ((torch.float16,), EIGHT, None, "float16 weights with --fp8-param-gather"),
    ):  # fmt: skip
        model, config = OddModel().to(dtypes[0]), OptimizerConfig(lr=LR, optimizer_offload_policy=policy)
        model.last.to(dtypes[-1])
        model.last.weight.gather_dtype = gather_dtype  # type: ignore[assignment]
        with pytest.raises(ConfigError, match=message):
            from_config([model], config, ZeroStage.OPTIMIZER, data_parallel_groups())
        if gather_dtype:  # where nothing is gathered; two types, where nothing is offloaded
            from_config([model], config, ZeroStage.NONE, data_parallel_groups())
        else:
            from_config([model], OptimizerConfig(lr=LR), ZeroStage.NONE, data_parallel_groups())


def test_states_of_two_types_are_not_offloaded_nor_unready_shards_gathered_in_8_bits() -> None:
    run_distributed(_refuse_offload_and_gathers_in_8_bits, 2)
