"""The automatic choices of a run, all of them, in the order in which they depend on each other."""

from __future__ import annotations

from patch.config import RunConfig, resolve_transformer_impl
from patch.config.rules import is_legal
from patch.device import MachineFacts
from patch.plan.activation_choice import resolve_activations
from patch.plan.context_parallel import resolve_cp_comm_type
from patch.plan.fp8_choice import resolve_fp8_weights
from patch.plan.sharding import resolve_sharding


def resolve_run(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace every `auto` of a run that has passed the rules.

    Args:
        config: the run.
        machine: where it runs; all are taken to be equal.
    Returns:
        the run, and lines about what was looked at and chosen.
    """
    config, layers = resolve_transformer_impl(config, machine)
    config, sharding = resolve_sharding(config, machine)
    config, communication = resolve_cp_comm_type(config)
    config, fp8_weights = resolve_fp8_weights(config, machine)
    config, activations = resolve_activations(config, machine)
    return config, layers + sharding + communication + fp8_weights + activations


def resolve_if_legal(config: RunConfig, machine: MachineFacts) -> RunConfig | None:
    """A run with its `auto` replaced; None if a rule refuses it.

    Args:
        config, machine: see `resolve_run`.
    """
    return resolve_run(config, machine)[0] if is_legal(config, machine) else None
