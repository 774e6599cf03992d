"""The learning rate against megatron-core's OptimizerParamScheduler."""

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from patch.config.schema import OptimizerConfig
from patch.optimizer import ParamGroup, learning_rate

CONFIG = OptimizerConfig(lr=3e-3, min_lr=2e-4, lr_warmup_iters=7)


def _upstream_schedule(optimizer: torch.optim.Optimizer) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=3e-3, min_lr=2e-4, lr_warmup_steps=7, lr_decay_steps=40,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=40, wd_incr_style="constant",
    )  # fmt: skip


def test_rate_equals_upstreams_after_as_many_steps() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    upstream = _upstream_schedule(optimizer)
    for step in range(1, 41):
        upstream.step(1)
        assert learning_rate(step, 40, CONFIG) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


def test_the_rate_of_a_group_goes_between_its_own_ends_as_upstreams() -> None:
    groups = [ParamGroup([], 0.1, max_lr=4e-2), ParamGroup([], 0.1, max_lr=1e-4, min_lr=1e-5)]
    ends = [{"max_lr": 4e-2}, {"max_lr": 1e-4, "min_lr": 1e-5}]
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], **end} for end in ends], lr=0.0)
    upstream = _upstream_schedule(optimizer)
    for step in range(1, 41):
        upstream.step(1)
        for group, expected in zip(groups, optimizer.param_groups, strict=True):
            assert learning_rate(step, 40, CONFIG, group) == pytest.approx(expected["lr"], rel=1e-12)


def test_rate_is_exact_at_the_ends() -> None:
    assert learning_rate(1, 40, CONFIG) == pytest.approx(3e-3 / 7)
    assert learning_rate(7, 40, CONFIG) == 3e-3
    assert learning_rate(40, 40, CONFIG) == 2e-4
