"""Learning rate as a pure function of the step: linear warm-up, then cosine decay."""

import math

from patch.config.schema import OptimizerConfig
from patch.optimizer.param_groups import ParamGroup


def learning_rate(
    step: float, train_iters: float, optimizer: OptimizerConfig, group: ParamGroup | None = None
) -> float:
    """The learning rate of one step.

    Args:
        step: counted from 1. The first step has lr / warm-up steps (in Megatron-LM it has 0 and changes
            nothing); the last one has exactly min_lr. Steps of another batch size count by their samples.
        train_iters: steps of the whole run, where the cosine ends.
        optimizer: lr, min_lr and the number of warm-up steps.
        group: a parameter group, whose own max_lr and min_lr replace the optimizer's; None: the optimizer's.
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
