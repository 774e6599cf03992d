"""The learning rate as a function of the step: linear warm-up, then cosine decay."""

from __future__ import annotations

import math
from collections.abc import Sequence

from patch.config.schema import OptimizerConfig
from patch.errors import TrainingError
from patch.optimizer.param_groups import ParamGroup


def learning_rate(
    step: float, train_iters: float, optimizer: OptimizerConfig, group: ParamGroup | None = None
) -> float:
    """Return the learning rate of one step: linear warm-up, then cosine decay.

    Args:
        step: counted from 1. The first step has lr / warm-up steps (in Megatron-LM 0, which changes nothing);
            the last step has exactly min_lr. With a varying batch size, steps are measured in samples.
        train_iters: steps of the whole run, where the cosine ends.
        group: a parameter group whose max_lr and min_lr, if set, replace those of `optimizer`.
    Source: Loshchilov & Hutter, arXiv:1608.03983, without restarts.
    """
    max_lr = optimizer.lr if group is None or group.max_lr is None else group.max_lr
    min_lr = optimizer.min_lr if group is None or group.min_lr is None else group.min_lr
    warmup = optimizer.lr_warmup_iters
    if step <= warmup:
        return max_lr * step / warmup
    progress = (step - warmup) / max(1, train_iters - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return min_lr + (max_lr - min_lr) * cosine


def group_rates(lr: float | Sequence[float], groups: Sequence[ParamGroup]) -> list[float]:
    """Return the learning rate of each group in one step, multipliers included.

    Raises:
        TrainingError: `lr` is a sequence with another number of rates than of groups.
    """
    rates = [lr] * len(groups) if isinstance(lr, (int, float)) else lr
    if len(rates) != len(groups):
        raise TrainingError(
            f"got {len(rates)} learning rates for {len(groups)} parameter groups, expected one rate for all "
            "groups, or one for each"
        )
    return [rate * group.lr_multiplier for rate, group in zip(rates, groups, strict=True)]
