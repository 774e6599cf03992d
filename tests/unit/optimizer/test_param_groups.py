"""Parameter groups: megatron-core's own say who is in which, torch's AdamW what they do."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from megatron.core import parallel_state
from megatron.core.optimizer import _get_param_groups, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import OptimizerConfig as UpstreamConfig
from megatron.core.process_groups_config import ProcessGroupCollection
from optimizer_runs import LR, OddModel, build_optimizer, make_steps, on_host
from small_runs import small_run
from training_runs import build_seeded_run

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.errors import ConfigError, TrainingError
from patch.optimizer import ParamGroup, default_param_groups
from patch.training.step import train_step

# Two orders of rounding in Adam, over ten steps.
BOUND = 1e-6
RATES = {"lr": 2e-3, "min_lr": 1e-4, "weight_decay": 0.3}
ENDS = ((None, None), (1e-2, None), (1e-2, 1e-3))
DECOUPLED = [{"decoupled_lr": most, "decoupled_min_lr": least} for most, least in ENDS]
WARMUP_ITERS, UPSTREAMS = 4, ("max_lr", "min_lr", "is_expert_parallel")

Members = dict[tuple[float, float, float, bool], set[int]]
"""Ids of the parameters by weight decay, highest and lowest learning rate, and whether they are experts."""


def ours(stages: Sequence[torch.nn.Module], rates: dict[str, Any], groups: Any = None) -> Members:
    config = OptimizerConfig(**RATES, **rates)
    found = {}
    for group in default_param_groups(stages, config, groups):
        most = config.lr if group.max_lr is None else group.max_lr
        least = config.min_lr if group.min_lr is None else group.min_lr
        is_expert = group.data_parallel_group is not None
        if group.params:
            found[group.weight_decay, most, least, is_expert] = {id(p) for p in group.params}
    return found


def upstreams(stages: Sequence[torch.nn.Module], rates: dict[str, Any]) -> Members:
    config = UpstreamConfig(**RATES, **rates)
    return {
        (group["wd_mult"] * RATES["weight_decay"], *(group[name] for name in UPSTREAMS)): {
            id(parameter) for parameter in group["params"]
        }
        for group in _get_param_groups(stages, config, get_standard_config_overrides(config))
        if group["params"]
    }


class WideBias(torch.nn.Module):
    """A bias of two dimensions, as stacked experts have."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Module()
        self.experts.weight = torch.nn.Parameter(torch.ones(2, 3, 4))
        self.experts.bias = torch.nn.Parameter(torch.ones(2, 4))


def compare_members() -> None:
    found = []
    for changes in ({"add_qkv_bias": True}, {"untie_embeddings_and_output_weights": False}):
        stages = build_seeded_run(small_run(pp=2, **changes)).stages
        for rates in DECOUPLED:
            assert ours(stages, rates) == upstreams(stages, rates)
            found.append(len(ours(stages, rates)))
        new_job()
    assert set(found) == {2, 3}
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = [WideBias(), torch.nn.Linear(2, 3)]
    assert ours(model, DECOUPLED[0]) == upstreams(model, DECOUPLED[0])
    for parameter in model[0].parameters():
        parameter.allreduce = False  # type: ignore[attr-defined]
    for rates in DECOUPLED:
        assert ours(model, rates, groups) == upstreams(model, rates)


def groups_of(model: OddModel) -> list[ParamGroup]:
    """Matrices and vectors mixed, in another order than that of the model."""
    return [
        ParamGroup([model.gain, model.first.weight], weight_decay=0.0),
        ParamGroup([model.last.bias, model.last.weight], weight_decay=0.3, lr_multiplier=0.25),
        ParamGroup([model.first.bias], weight_decay=0.05),
    ]


def train_groups(rank: int, world_size: int) -> list[float]:
    """How far the weights are from AdamW's after ten steps at rates that change, by ZeRO stage."""
    found = []
    for zero_stage, offload in product(ZeroStage, (None, on_host(0.5))):
        model, plain = OddModel(), OddModel()
        optimizer = build_optimizer(model, zero_stage, param_groups=groups_of(model), offload=offload)
        groups = [{"params": [*each.params], "weight_decay": each.weight_decay} for each in groups_of(plain)]
        adamw = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))
        for number, step in enumerate(make_steps(10, world_size, 1)):
            rates = [LR, LR / (1 + number), 2 * LR]
            optimizer.zero_grad(rates)
            model(step[rank][0]).backward()
            optimizer.step()
            adamw.zero_grad()
            sum(plain(batches[0]) for batches in step).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            for group, rate, multiplier in zip(adamw.param_groups, rates, (1.0, 0.25, 1.0), strict=True):
                group["lr"] = rate * multiplier
            adamw.step()
        optimizer.finish_param_sync()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        found.append(max((a - b).abs().max().item() for a, b in pairs))
    return found


@pytest.mark.usefixtures("one_process")
def test_each_trainable_parameter_belongs_to_one_group() -> None:
    model = OddModel()
    whole = groups_of(model)
    other = ParamGroup([OddModel().gain], weight_decay=0.0)
    for groups, message in (
        (whole[:2], r"first.bias is in 0 parameter groups, expected one"),
        ([*whole, whole[2]], r"first.bias is in 2 parameter groups, expected one"),
        ([*whole, other], r"group 3 holds a parameter of shape \(7,\) that is in no stage"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_optimizer(model, ZeroStage.NONE, param_groups=groups)
    model.gain.requires_grad_(False)  # frozen ones may be there
    optimizer = build_optimizer(model, ZeroStage.NONE, param_groups=whole)
    with pytest.raises(TrainingError, match="got 2 learning rates for 3 parameter groups"):
        optimizer.zero_grad([LR, LR])
    frozen = build_optimizer(OddModel().requires_grad_(False), ZeroStage.NONE, param_groups=[])
    frozen.zero_grad(LR)
    assert frozen.step().grad_norm == 0.0


def first_moves() -> dict[str, float]:
    """By how much the first step moves each weight at most, decay aside: Adam's rate."""
    config = small_run(pp=2, decoupled_lr=1e-2, lr_warmup_iters=WARMUP_ITERS, weight_decay=0.0, clip_grad=0.0)
    run = build_seeded_run(config)
    before = [{name: p.detach().clone() for name, p in stage.named_parameters()} for stage in run.stages]
    result = train_step(run, 0)
    assert result.lr == pytest.approx(config.optimizer.lr / WARMUP_ITERS)
    run.optimizer.finish_param_sync()
    return {
        name: (parameter - old[name]).abs().max().item()
        for stage, old in zip(run.stages, before, strict=True)
        for name, parameter in stage.named_parameters()
    }


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    """Every parameter is in the group that megatron-core puts it in; what groups do over two ranks."""
    gaps = train_groups(rank, world_size)
    new_job()
    moves = first_moves()
    new_job()
    compare_members()
    return {"gaps": gaps, "moves": moves}


def test_groups_over_ranks_are_upstreams_and_train_alike_but_for_the_decoupled_rate() -> None:
    ranks = run_distributed(run_all, 2)
    assert max(gap for found in ranks for gap in found["gaps"]) < BOUND
    first, last = (found["moves"] for found in ranks)
    decoupled = {name for name in {**first, **last} if "embedding" in name or "output_layer" in name}
    assert len(decoupled) == 2
    for name, move in {**first, **last}.items():
        rate = 1e-2 if name in decoupled else 2e-3
        assert move == pytest.approx(rate / WARMUP_ITERS, rel=1e-3), name
