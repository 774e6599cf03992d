"""The automatic choices of a run, all of them, in the order in which they depend on each other."""

from __future__ import annotations

import dataclasses

from patch.checks.rules import is_legal
from patch.config import RunConfig, resolve_transformer_impl
from patch.device import MachineFacts
from patch.plan.activation_choice import resolve_activations
from patch.plan.activation_peak import heaviest_rank, host_memory_needed
from patch.plan.context_parallel import resolve_cp_comm_type
from patch.plan.memory import device_memory, usable_device_memory
from patch.plan.savings import Mix, with_mix
from patch.plan.sharding import resolve_sharding
from patch.storage.sizes import size_text


def resolve_fp8_weights(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Keep no 8-bit weights where there is no memory for them; call before `resolve_activations`.

    With AC=auto there must be room while all activations are kept: recomputing a layer costs more than making
    its 8-bit weights again.

    Returns:
        the run with `--disable-parameter-transpose-cache` if they do not fit, and a line that says so.
    """
    if not config.keeps_8_bit_weights:
        return config, []
    is_auto = config.training.recompute_granularity == "auto"
    run = with_mix(config, Mix()) if is_auto else config
    rank = heaviest_rank(run, cuda=bool(machine.cuda_devices))
    if device_memory(config, machine):
        has_room = rank.total <= usable_device_memory(config, machine)
    else:
        has_room = not 0 < machine.host_memory_bytes < host_memory_needed(run, machine, rank)
    if has_room:
        return config, []
    training = dataclasses.replace(config.training, disable_parameter_transpose_cache=True)
    line = (
        f"8-bit weights are made in each micro-batch: there is no room to keep {size_text(rank.fp8_weights)} "
        f"beside the {size_text(rank.total - rank.fp8_weights)} of a rank"
    )
    return dataclasses.replace(config, training=training), [line]


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
