"""The learning rate against megatron-core's OptimizerParamScheduler."""

import itertools
from typing import Any

import pytest
import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from patch.config.fields import FIELDS
from patch.config.schema import OptimizerConfig
from patch.optimizer import learning_rate

ENDS: list[dict[str, float]] = [{}, {"max_lr": 4e-2}, {"max_lr": 1e-4, "min_lr": 1e-5}]
"""Of a group: those of the configuration, or its own."""
STEPS = 40
STYLES: list[dict[str, Any]] = [
    *({"lr_decay_style": style} for style in FIELDS["lr_decay_style"].choices if style != "WSD"),
    *(
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_wsd_decay_style": style}
        for style in FIELDS["lr_wsd_decay_style"].choices
    ),
]
LENGTHS: list[dict[str, Any]] = [{}, {"lr_decay_iters": 30}, {"lr_decay_iters": 60}]
WARMUPS: list[dict[str, Any]] = [{}, {"lr_warmup_iters": 7}, {"lr_warmup_iters": 7, "lr_warmup_init": 5e-5}]


@pytest.mark.parametrize("style", STYLES, ids=lambda style: "-".join(map(str, style.values())))
def test_the_rate_of_a_group_is_upstreams_after_as_many_steps(style: dict[str, Any]) -> None:
    for length, warmup in itertools.product(LENGTHS, WARMUPS):
        config = OptimizerConfig(lr=3e-3, min_lr=2e-4, **style, **length, **warmup)
        optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], **ends} for ends in ENDS], lr=0.0)
        upstream = OptimizerParamScheduler(
            optimizer, init_lr=config.lr_warmup_init, max_lr=3e-3, min_lr=2e-4,
            lr_warmup_steps=config.lr_warmup_iters, lr_decay_steps=config.lr_decay_iters or STEPS,
            lr_decay_style=config.lr_decay_style, start_wd=0.1, end_wd=0.1, wd_incr_steps=STEPS,
            wd_incr_style="constant", wsd_decay_steps=config.lr_wsd_decay_iters,
            lr_wsd_decay_style=config.lr_wsd_decay_style,
        )  # fmt: skip
        for step in range(1, STEPS + 1):
            upstream.step(1)
            for ends, expected in zip(ENDS, optimizer.param_groups, strict=True):
                rate = learning_rate(step, STEPS, config, **ends)
                assert rate == pytest.approx(expected["lr"], rel=1e-12)


def test_the_ends_are_exact() -> None:
    config = OptimizerConfig(lr=3e-3, min_lr=2e-4, lr_warmup_iters=7)
    assert learning_rate(7, STEPS, config) == 3e-3 and learning_rate(STEPS, STEPS, config) == 2e-4
