"""Parameter groups: which parameters share a weight decay and a learning rate."""

from __future__ import annotations

from typing import NamedTuple

import torch

from patch.config.schema import OptimizerConfig


class GroupOptions(NamedTuple):
    """What distinguishes a parameter group."""

    weight_decay: float
    lr_multiplier: float = 1.0


def group_of(parameter: torch.nn.Parameter) -> int:
    """Index of a parameter's group: matrices decay, vectors (norms, biases) do not."""
    return int(parameter.ndim <= 1)


def group_options(config: OptimizerConfig) -> list[GroupOptions]:
    """The groups that `group_of` tells apart."""
    return [GroupOptions(config.weight_decay), GroupOptions(weight_decay=0.0)]
