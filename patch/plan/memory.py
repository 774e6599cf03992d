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
    """Weights, fp32 main gradients and replicated optimizer states of the heaviest rank."""
    parameters = max(parameters_per_rank(config))
    is_fp32 = config.training.precision == "fp32"
    return RankBytes(
        weights=parameters * (4 if is_fp32 else 2),
        gradients=parameters * 4,
        optimizer=parameters * (8 if is_fp32 else 12),
    )
