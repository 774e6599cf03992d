"""The learning rate against megatron-core's OptimizerParamScheduler."""

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from patch.config.schema import OptimizerConfig
from patch.optimizer import learning_rate

CONFIG = OptimizerConfig(lr=3e-3, min_lr=2e-4, lr_warmup_iters=7)


def test_rate_equals_upstreams_after_as_many_steps() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.0)
    upstream = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=3e-3, min_lr=2e-4, lr_warmup_steps=7, lr_decay_steps=40,
        lr_decay_style="cosine", start_wd=0.1, end_wd=0.1, wd_incr_steps=40, wd_incr_style="constant",
    )  # fmt: skip
    for step in range(1, 41):
        upstream.step(1)
        assert learning_rate(step, 40, CONFIG) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-12)


def test_rate_is_exact_at_the_ends() -> None:
    assert learning_rate(1, 40, CONFIG) == pytest.approx(3e-3 / 7)
    assert learning_rate(7, 40, CONFIG) == 3e-3
    assert learning_rate(40, 40, CONFIG) == 2e-4
