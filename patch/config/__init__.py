"""The configuration of a run: from a command line to one frozen, checked RunConfig.

Imports neither torch nor megatron, so that a wrong command fails at once.
"""

from patch.config.backends import resolve_transformer_impl
from patch.config.cluster import Rendezvous, slurm_task
from patch.config.data_record import SetRecord
from patch.config.execution import Execution
from patch.config.file_rules import run_warnings
from patch.config.hub_names import fetch_from_hub, weights_here
from patch.config.machines import set_spares_aside, usable_sizes
from patch.config.parse import Invocation, parse_args
from patch.config.positions import unknown_variables, user_message
from patch.config.resume_guard import check_tokens, remember_data, resume_notes
from patch.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from patch.config.validate import validate_run
from patch.config.yaml_io import read_run, read_yaml, to_yaml

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "Execution",
    "Invocation",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "Rendezvous",
    "RunConfig",
    "SetRecord",
    "TrainingConfig",
    "check_tokens",
    "fetch_from_hub",
    "parse_args",
    "read_run",
    "read_yaml",
    "remember_data",
    "resolve_transformer_impl",
    "resume_notes",
    "run_warnings",
    "set_spares_aside",
    "slurm_task",
    "to_yaml",
    "unknown_variables",
    "usable_sizes",
    "user_message",
    "validate_run",
    "weights_here",
]
