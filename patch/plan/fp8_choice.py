"""Whether 8-bit weights are kept from a step's first micro-batch to its last (`--precision fp8`)."""

from __future__ import annotations

import dataclasses

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan.activation_choice import Mix, with_mix
from patch.plan.activation_peak import heaviest_rank, host_memory_needed
from patch.plan.memory import device_memory, usable_device_memory
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
