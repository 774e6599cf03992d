"""The learning rate against megatron-core's OptimizerParamScheduler."""

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from patch.config.schema import OptimizerConfig
from patch.optimizer import ParamGroup, learning_rate

ENDS = [{}, {"max_lr": 4e-2}, {"max_lr": 1e-4, "min_lr": 1e-5}]
"""Of a group: those of the configuration, or its own."""


def test_the_rate_of_a_group_is_upstreams_after_as_many_steps() -> None:
    config = OptimizerConfig(lr=3e-3, min_lr=2e-4, lr_warmup_iters=7)
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], **ends} for ends in ENDS], lr=0.0)
    upstream = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=3e-3, min_lr=2e-4, lr_warmup_steps=7, lr_decay_steps=40,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=40, wd_incr_style="constant",
    )  # fmt: skip
    for step in range(1, 41):
        upstream.step(1)
        for ends, expected in zip(ENDS, optimizer.param_groups, strict=True):
            rate = learning_rate(step, 40, config, ParamGroup([], 0.1, **ends))
            assert rate == pytest.approx(expected["lr"], rel=1e-12)
    assert learning_rate(7, 40, config) == 3e-3 and learning_rate(40, 40, config) == 2e-4
