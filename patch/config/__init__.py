"""Configuration of a run: flags, positions and YAML become one frozen RunConfig.

This package imports neither torch nor megatron, so a wrong command fails at once.
"""

from patch.config.positions import unknown_variables, user_message
from patch.config.schema import ModelConfig, ParallelConfig, RunConfig
from patch.config.yaml_io import read_run, to_yaml

__all__ = [
    "ModelConfig", "ParallelConfig", "RunConfig", "read_run", "to_yaml", "unknown_variables", "user_message",
]  # fmt: skip
