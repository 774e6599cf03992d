"""The optimizer: gradients, AdamW, schedule; see README.md.

`build_optimizer` wraps any torch module in an `OverlappedDistributedOptimizer`. `OptimizerConfig` holds
rates and limits; `ZeroStage` selects what data-parallel ranks shard. `step` returns a `StepOutcome`,
`report` an `OptimizerReport`; `learning_rate` is the schedule. torch.distributed must be initialized.
megatron-core's parallel_state and `compat.apply` are not needed.
"""

from patch.config.choices import ZeroStage
from patch.config.schedule import learning_rate
from patch.config.schema import OptimizerConfig
from patch.optimizer.build import build_optimizer
from patch.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer, StepOutcome
from patch.optimizer.param_groups import ParamGroup, default_param_groups
from patch.optimizer.states.hybrid_adam import OptimizerReport

__all__ = [
    "OptimizerConfig",
    "OptimizerReport",
    "OverlappedDistributedOptimizer",
    "StepOutcome",
    "ParamGroup",
    "ZeroStage",
    "build_optimizer",
    "default_param_groups",
    "learning_rate",
]
