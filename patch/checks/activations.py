"""Rules of recomputed activations, and of activations, weights and optimizer states in host memory."""

from __future__ import annotations

from typing import NoReturn

from patch.checks.model import divisors
from patch.config.choices import ZeroStage
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


def check_activation_choice(config: RunConfig, machine: MachineFacts) -> None:
    """Check that `auto` has a memory limit."""
    is_auto = config.training.recompute_granularity == "auto"
    if is_auto and not machine.cuda_devices and not config.optimizer.simulated_device_memory:
        expected = "none, selective, full, or auto with --simulated-device-memory BYTES"
        why = "there is no GPU whose memory the activations should fit"
        refuse("recompute_granularity", "auto", expected, why)


def offload_is_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Require a device whose memory can be watched for the policy `auto`."""
    optimizer = config.optimizer
    is_auto = optimizer.optimizer_offload_policy == "auto"
    if is_auto and not machine.cuda_devices and not optimizer.simulated_device_memory:
        expected = "false, static, or auto with --simulated-device-memory BYTES"
        refuse("optimizer_offload_policy", "auto", expected, "there is no GPU whose memory could be watched")


def refuse_weights_on_host() -> NoReturn:
    """Refuse weights in host memory whose states are on the device."""
    expected = f"false, or static or auto at {where('optimizer_offload_policy')}, of as large a share"
    refuse("cpu_offloading_weights", "true", expected, "weights in host memory are updated there")


def weight_offload_is_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Check that weights in host memory are ZeRO-3 shards updated there; `auto` needs a device to fit."""
    optimizer = config.optimizer
    if not optimizer.cpu_offloading_weights:
        return
    if config.sharding not in ("auto", ZeroStage.PARAMETERS):
        expected = f"false, or {where('data_parallel_sharding')} parameters"
        why = "only there are weights gathered for each pass, and freed after it"
        refuse("cpu_offloading_weights", "true", expected, why)
    policy, share = optimizer.optimizer_offload_policy, optimizer.cpu_offloading_weights_fraction
    states = optimizer.optimizer_offload_fraction if policy == "static" else float(policy is not None)
    if states < (share or 0):
        refuse_weights_on_host()
    is_auto, has_device = optimizer.cpu_offloading_weights_fraction is None, machine.cuda_devices
    if is_auto and not has_device and not optimizer.simulated_device_memory:
        expected = "0 to 1, or auto with --simulated-device-memory BYTES"
        why = "there is no GPU whose memory the weights should fit"
        refuse("cpu_offloading_weights_fraction", "auto", expected, why)
