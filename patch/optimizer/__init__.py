"""The optimizer: gradients, AdamW, schedule; see README.md."""

from patch.config.choices import ZeroStage
from patch.optimizer.build import build_optimizer
from patch.optimizer.overlapped_optimizer import (
    OptimizerReport,
    OverlappedDistributedOptimizer,
    StepOutcome,
)
from patch.optimizer.schedule import learning_rate

__all__ = [
    "OptimizerReport",
    "OverlappedDistributedOptimizer",
    "StepOutcome",
    "ZeroStage",
    "build_optimizer",
    "learning_rate",
]
