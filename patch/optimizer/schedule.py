"""Learning rate as a pure function of the step: linear warm-up, then cosine decay."""

import math

from patch.config.schema import OptimizerConfig


def learning_rate(step: int, train_iters: int, optimizer: OptimizerConfig) -> float:
    """The learning rate of one step.

    Args:
        step: counted from 1. The first step has lr / warm-up steps (in Megatron-LM it has 0 and changes
            nothing); the last one has exactly min_lr.
        train_iters: steps of the whole run, where the cosine ends.
        optimizer: lr, min_lr and the number of warm-up steps.
    Source: Loshchilov & Hutter, arXiv:1608.03983, without restarts.
    """
    warmup = optimizer.lr_warmup_iters
    if step <= warmup:
        return optimizer.lr * step / warmup
    progress = (step - warmup) / max(1, train_iters - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return optimizer.min_lr + (optimizer.lr - optimizer.min_lr) * cosine
