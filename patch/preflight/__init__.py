"""What a run asks of the world before it starts. Imports neither torch nor megatron."""

from patch.preflight.cluster import Rendezvous, slurm_task
from patch.preflight.data_record import SetRecord
from patch.preflight.hub_names import fetch_from_hub, weights_here
from patch.preflight.parse import Invocation, parse_args
from patch.preflight.resume_guard import check_tokens, remember_data, resume_notes
from patch.preflight.validate import run_warnings, validate_run

__all__ = [
    "Invocation",
    "Rendezvous",
    "SetRecord",
    "check_tokens",
    "fetch_from_hub",
    "parse_args",
    "remember_data",
    "resume_notes",
    "run_warnings",
    "slurm_task",
    "validate_run",
    "weights_here",
]
