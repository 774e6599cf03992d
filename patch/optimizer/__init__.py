"""The optimizer: gradients, AdamW, schedule; see README.md."""

from patch.config.choices import ZeroStage
from patch.optimizer.build import build_optimizer
from patch.optimizer.overlapped_optimizer import (
    OptimizerReport,
    OverlappedDistributedOptimizer,
    StepOutcome,
)
from patch.optimizer.param_groups import ParamGroup, default_param_groups
from patch.optimizer.schedule import learning_rate

__all__ = [
    "OptimizerReport",
    "OverlappedDistributedOptimizer",
    "StepOutcome",
    "ParamGroup",
    "ZeroStage",
    "build_optimizer",
    "default_param_groups",
    "learning_rate",
]
