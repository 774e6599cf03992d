"""What becomes of the activations of each layer: which are offloaded, recomputed, kept (AC, position 17).

The layers of a pipeline stage (with interleaving: of each of a process's stages) in the order of forward:

    first the offloaded ones    they are away longest, and their copies have the most time
    then the recomputed ones    with --recompute-method block; uniform recomputes all layers
    then those that are kept    their backward comes first
"""

from __future__ import annotations

from typing import NamedTuple

from patch.config.execution import Execution
from patch.config.positions import refuse
from patch.config.schema import RunConfig, TrainingConfig
from patch.device import MachineFacts
from patch.storage.sizes import counted


class StageActivations(NamedTuple):
    """Numbers of layers of one stage, in this order."""

    offloaded: int
    """Their activations are in host memory until backward needs them."""
    recomputed: int
    """Only their inputs are kept; with --recompute-method uniform only those of blocks of layers."""
    kept: int
    """All that backward needs is kept; with AC=sel (as of offloaded layers) what it keeps."""


def stage_activations(num_layers: int, settings: TrainingConfig | Execution) -> StageActivations:
    """How a stage of this many layers is split. A stage that has fewer than are asked for gives what it has.

    Args:
        num_layers: of the stage.
        settings: of the run.
    """
    is_full = settings.recompute_granularity == "full"
    if is_full and settings.recompute_method == "uniform":
        return StageActivations(0, num_layers, 0)
    recomputed = settings.recompute_num_layers if is_full else 0
    offloaded = 0
    if settings.cpu_offloading:
        # Backward of the stage's last layer often follows its forward at once.
        all_but_last = max(num_layers - recomputed - 1, 1)
        offloaded = min(settings.cpu_offloading_num_layers or all_but_last, num_layers)
    recomputed = min(recomputed, num_layers - offloaded)
    return StageActivations(offloaded, recomputed, num_layers - offloaded - recomputed)


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
