"""What a run needs, by arithmetic over its configuration: parameters, FLOPs, bytes. Imports no torch."""

from patch.plan.activation_choice import resolve_activations
from patch.plan.activation_peak import activation_peak
from patch.plan.activations import activation_bytes
from patch.plan.context_parallel import resolve_cp_comm_type, sent_bytes
from patch.plan.cures import cures, refuse_what_cannot_fit
from patch.plan.describe import describe_length, describe_plan, start_lines
from patch.plan.fits import Fit, fit_of
from patch.plan.flops import StepFlops, attended_pairs, flops_per_step, flops_per_token, peak_flops
from patch.plan.memory import RankBytes, bytes_per_rank, device_memory, needed_bytes, offloaded_bytes
from patch.plan.parameters import parameters_per_rank, total_parameters
from patch.plan.planned_run import Planned, plan_run
from patch.plan.report import describe_here
from patch.plan.resolve import resolve_fp8_weights, resolve_run
from patch.plan.search import Found, Layout, search
from patch.plan.sharding import StageCost, resolve_sharding, stage_cost
from patch.plan.timing.step_time import StepTime, step_time

__all__ = [
    "Fit",
    "Found",
    "Layout",
    "Planned",
    "RankBytes",
    "StageCost",
    "StepFlops",
    "StepTime",
    "activation_bytes",
    "activation_peak",
    "bytes_per_rank",
    "cures",
    "describe_here",
    "describe_length",
    "describe_plan",
    "device_memory",
    "attended_pairs",
    "fit_of",
    "flops_per_step",
    "flops_per_token",
    "needed_bytes",
    "offloaded_bytes",
    "parameters_per_rank",
    "peak_flops",
    "plan_run",
    "refuse_what_cannot_fit",
    "resolve_activations",
    "resolve_cp_comm_type",
    "resolve_fp8_weights",
    "resolve_run",
    "resolve_sharding",
    "search",
    "sent_bytes",
    "stage_cost",
    "step_time",
    "start_lines",
    "total_parameters",
]
