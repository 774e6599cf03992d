"""Rules of recomputed activations, and of activations, weights and optimizer states in host memory."""

from __future__ import annotations

from typing import NoReturn

from patch.checks.model import divisors
from patch.config.fields import scalar_of
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.text import counted


def recompute_divides(config: RunConfig, machine: MachineFacts) -> None:
    """Require blocks of full recomputation that divide each stage's layers."""
    block, stages = config.training.recompute_num_layers, sorted(set(config.stage_layers))
    is_uniform = config.training.recompute_method == "uniform"
    is_full = config.training.recompute_granularity == "full"
    if is_full and is_uniform and any(layers % block for layers in stages):
        why = f"a stage has {' or '.join(map(str, stages))} layers"
        refuse("recompute_num_layers", block, f"one of {divisors(*stages)}", why)


def check_activation_layers(config: RunConfig, machine: MachineFacts) -> None:
    """Check that stages have enough layers for those that are offloaded or recomputed."""
    training, most = config.training, max(config.stage_layers)
    is_full, is_uniform = training.recompute_granularity == "full", training.recompute_method == "uniform"
    has = f"the largest stage has {counted(most, 'layer')}"
    recomputed = training.recompute_num_layers if is_full and not is_uniform else 0
    if recomputed > most - training.cpu_offloading:
        others = ", and one at least is offloaded (--cpu-offloading)" if training.cpu_offloading else ""
        expected = f"at most {most - training.cpu_offloading}"
        if most == training.cpu_offloading:
            expected = "--recompute-granularity selective or none"
        refuse("recompute_num_layers", recomputed, expected, f"{has}{others}")
    offloaded = training.cpu_offloading_num_layers or 0
    if training.cpu_offloading and offloaded + recomputed > most:
        others = f", and {recomputed} are recomputed (--recompute-num-layers)" if recomputed else ""
        refuse("cpu_offloading_num_layers", offloaded, f"at most {most - recomputed}", f"{has}{others}")


_AUTO = {
    "recompute_granularity": ("none, selective, full", "the activations should fit"),
    "optimizer_offload_policy": ("false, static", "could be watched"),
    "cpu_offloading_weights_fraction": ("0 to 1", "the weights should fit"),
}
"""Fields whose `auto` needs a device's memory: their other values, and what the memory is needed for."""


def auto_has_a_device(config: RunConfig, machine: MachineFacts) -> None:
    """Require a GPU, or a simulated one, for each value that follows from its memory."""
    optimizer = config.optimizer
    if machine.cuda_devices or optimizer.simulated_device_memory:
        return
    for field, (others, purpose) in _AUTO.items():
        has_effect = optimizer.cpu_offloading_weights or field != "cpu_offloading_weights_fraction"
        if has_effect and scalar_of(config, field) == "auto":
            expected = f"{others}, or auto with --simulated-device-memory BYTES"
            refuse(field, "auto", expected, f"there is no GPU whose memory {purpose}")


def refuse_weights_on_host() -> NoReturn:
    """Refuse weights in host memory whose states are on the device."""
    expected = f"false, or static or auto at {where('optimizer_offload_policy')}, of as large a share"
    refuse("cpu_offloading_weights", "true", expected, "weights in host memory are updated there")


def weight_offload_is_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Check that weights in host memory are ZeRO-3 shards updated there; `auto` needs a device to fit."""
    optimizer = config.optimizer
    if not optimizer.cpu_offloading_weights:
        return
    policy, share = optimizer.optimizer_offload_policy, optimizer.cpu_offloading_weights_fraction
    states = optimizer.optimizer_offload_fraction if policy == "static" else float(policy is not None)
    if states < (share or 0):
        refuse_weights_on_host()
