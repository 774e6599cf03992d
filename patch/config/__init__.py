"""Configuration of a run: flags, positions and YAML become one frozen RunConfig.

This package imports neither torch nor megatron, so a wrong command fails at once.
"""

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
    "CheckpointConfig", "DataConfig", "ModelConfig", "OptimizerConfig", "ParallelConfig",
    "RunConfig", "TrainingConfig", "read_run", "read_yaml", "to_yaml",
    "unknown_variables", "user_message",
]  # fmt: skip
