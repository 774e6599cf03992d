"""The rules of what is recomputed and what is in host memory: activations, weights, optimizer states."""

from __future__ import annotations

from patch.checks.model import divisors
from patch.config.choices import ZeroStage
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.numbers import counted


def recompute_divides(config: RunConfig, machine: MachineFacts) -> None:
    """Full recomputation divides a stage's layers into equal blocks."""
    block, stages = config.training.recompute_num_layers, sorted(set(config.stage_layers))
    is_uniform = config.training.recompute_method == "uniform"
    is_full = config.training.recompute_granularity == "full"
    if is_full and is_uniform and any(layers % block for layers in stages):
        why = f"a stage has {' or '.join(map(str, stages))} layers"
        refuse("recompute_num_layers", block, f"one of {divisors(*stages)}", why)


def check_activation_layers(config: RunConfig, machine: MachineFacts) -> None:
    """Check that offload and recomputation of layers go together, and that the stages have so many layers.

    Raises:
        ConfigError: they do not.
    """
    training, most = config.training, max(config.stage_layers)
    is_full, is_uniform = training.recompute_granularity == "full", training.recompute_method == "uniform"
    if training.cpu_offloading and is_full and is_uniform:
        expected = "block, or --recompute-granularity selective or none"
        why = "it recomputes all layers, so --cpu-offloading finds none whose activations could travel"
        refuse("recompute_method", "uniform", expected, why)
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
    """Check that `auto` has a memory to fit, knows what it fits, and is not told what to choose.

    Raises:
        ConfigError: it has not, does not, or is.
    """
    training, field = config.training, "recompute_granularity"
    if training.recompute_granularity != "auto":
        return
    if not machine.cuda_devices and not config.optimizer.simulated_device_memory:
        expected = "none, selective, full, or auto with --simulated-device-memory BYTES"
        refuse(field, "auto", expected, "there is no GPU whose memory the activations should fit")
    if config.model.precision_align is not None:
        expected = "none, selective or full, or none at --precision-align"
        refuse(field, "auto", expected, "it is not planned what transformers' order of operations keeps")
    if training.cpu_offloading:
        expected = "false, or --recompute-granularity none or selective"
        refuse("cpu_offloading", "true", expected, "--recompute-granularity auto chooses the layers itself")


def offload_is_possible(config: RunConfig, machine: MachineFacts) -> None:
    """The policy `auto` needs a device whose memory it can watch."""
    optimizer = config.optimizer
    is_auto = optimizer.optimizer_offload_policy == "auto"
    if is_auto and not machine.cuda_devices and not optimizer.simulated_device_memory:
        expected = "false, static, or auto with --simulated-device-memory BYTES"
        refuse("optimizer_offload_policy", "auto", expected, "there is no GPU whose memory could be watched")


def weights_can_leave(config: RunConfig, machine: MachineFacts) -> None:
    """Weights in host memory come to the device as those of other ranks do; `auto` needs a device to fit."""
    optimizer = config.optimizer
    if not optimizer.cpu_offloading_weights:
        return
    if config.sharding not in ("auto", ZeroStage.PARAMETERS):
        expected = f"false, or {where('data_parallel_sharding')} parameters"
        why = "only there are weights gathered for each pass, and freed after it"
        refuse("cpu_offloading_weights", "true", expected, why)
    is_auto, has_device = optimizer.cpu_offloading_weights_fraction is None, machine.cuda_devices
    if is_auto and not has_device and not optimizer.simulated_device_memory:
        expected = "0 to 1, or auto with --simulated-device-memory BYTES"
        why = "there is no GPU whose memory the weights should fit"
        refuse("cpu_offloading_weights_fraction", "auto", expected, why)
