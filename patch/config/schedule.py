"""The learning rate as a function of the step. Imports neither torch nor megatron: the plan shows it too."""

from __future__ import annotations

import math
from collections.abc import Callable

from patch.config.choices import WsdDecay
from patch.config.optimizer_schema import OptimizerConfig

_LEFT: dict[WsdDecay, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
    "exponential": lambda progress: 2.0 * 0.5**progress - 1.0,
    "minus_sqrt": lambda progress: 1.0 - math.sqrt(progress),
}
"""Share of max_lr - min_lr that is left at a progress between 0 and 1."""


def learning_rate(
    step: float,
    train_iters: float,
    optimizer: OptimizerConfig,
    *,
    max_lr: float | None = None,
    min_lr: float | None = None,
) -> float:
    """Return the learning rate of one step: linear warm-up, then decay.

    Args:
        step: counted from 1. The first step has lr / warm-up steps (in Megatron-LM --lr-warmup-init, which is
            0 by default); the last step of the decay has exactly min_lr, unless the decay is constant or an
            inverse square root. With a varying batch size, steps are measured in samples.
        train_iters: steps of the whole run, where the decay ends without --lr-decay-iters.
        max_lr: highest rate of a parameter group, or None for --lr.
        min_lr: lowest rate of a parameter group, or None for --min-lr.
    Source: megatron/core/optimizer_param_scheduler.py, `get_lr`.
    """
    highest = optimizer.lr if max_lr is None else max_lr
    lowest = optimizer.min_lr if min_lr is None else min_lr
    warmup, initial, style = optimizer.lr_warmup_iters, optimizer.lr_warmup_init, optimizer.lr_decay_style
    end = train_iters if optimizer.lr_decay_iters is None else optimizer.lr_decay_iters
    if step <= warmup:
        return initial + (highest - initial) * step / warmup
    if style == "constant":
        return highest
    if step > end:
        return lowest
    if style == "inverse-square-root":
        return max(lowest, highest * (max(warmup, 1) / step) ** 0.5)
    length = (optimizer.lr_wsd_decay_iters if style == "WSD" else None) or end - warmup
    left = _LEFT[optimizer.lr_wsd_decay_style if style == "WSD" else style]
    return lowest + (highest - lowest) * left(max(0.0, step - (end - length)) / length)
