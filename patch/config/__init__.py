"""The language of a run: from words and numbers to one frozen RunConfig.

Imports neither torch nor megatron, so that a wrong command fails at once.
"""

from patch.config.backends import resolve_transformer_impl
from patch.config.execution import Execution
from patch.config.positions import unknown_variables, user_message
from patch.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from patch.config.yaml_io import read_run, read_yaml, to_yaml

__all__ = [
    "CheckpointConfig", "DataConfig", "Execution", "ModelConfig", "OptimizerConfig", "ParallelConfig",
    "RunConfig", "TrainingConfig", "read_run", "read_yaml", "resolve_transformer_impl", "to_yaml",
    "unknown_variables", "user_message",
]  # fmt: skip
