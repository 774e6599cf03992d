"""Bytes of model state on one rank. Activations are not in it: they depend on kernels and recomputation."""

from __future__ import annotations

from typing import NamedTuple

from patch.config import RunConfig
from patch.plan.parameters import parameters_per_rank


class RankBytes(NamedTuple):
    """Bytes on one rank of the heaviest pipeline stage."""

    weights: int
    gradients: int
    optimizer: int
    """fp32 masters (fp32 weights are their own masters) and the two moments."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.optimizer


def bytes_per_rank(config: RunConfig) -> RankBytes:
    """Weights, main gradients and optimizer states of the heaviest rank, staging buffers aside.

    Sharding divides the states over replicas (ZeRO-1), and the gradients too (ZeRO-2).
    """
    parameters, replicas = max(parameters_per_rank(config)), config.data_parallel_size
    level = config.sharding_level
    is_fp32 = config.training.precision == "fp32"
    gradients = parameters * (4 if config.optimizer.main_grads_dtype == "fp32" else 2)
    states = parameters * (8 if is_fp32 else 12)
    return RankBytes(
        weights=parameters * (4 if is_fp32 else 2),
        gradients=gradients // replicas if level == "gradients" else gradients,
        optimizer=states if level == "none" else states // replicas,
    )
