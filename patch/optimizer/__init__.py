"""The optimizer: gradients, AdamW, schedule; see README.md.

`build_optimizer` puts an `OverlappedDistributedOptimizer` around any torch module: `OptimizerConfig` holds
its rates and limits, `ZeroStage` says what the ranks share. `step` returns a `StepOutcome`, `report` an
`OptimizerReport`; `learning_rate` is the schedule. torch.distributed has to be initialized; megatron-core's
parallel_state and `compat.apply` are not needed.
"""

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.optimizer.build import build_optimizer
from patch.optimizer.hybrid_adam import OptimizerReport
from patch.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer, StepOutcome
from patch.optimizer.param_groups import ParamGroup, default_param_groups, learning_rate

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
