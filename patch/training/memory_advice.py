"""Advice for a run that ran out of memory: settings that need less and that this run does not use yet."""

from __future__ import annotations

import torch

from patch.config.choices import OffloadPolicy, Recompute, ZeroStage
from patch.config.positions import where
from patch.config.schema import OptimizerConfig, RunConfig
from patch.device import MachineFacts
from patch.plan import bytes_per_rank, cures, device_memory, needed_bytes
from patch.storage.sizes import size_text


def memory_advice(error: Exception, config: RunConfig, machine: MachineFacts) -> str:
    """One or two sentences that name the settings to change.

    Args:
        error: the out-of-memory error.
        config: the run.
        machine: this machine.
    """
    if is_device_error(error):
        return _on_device(config, machine)
    return _on_host(config, machine)


def is_device_error(error: Exception) -> bool:
    """Whether an out-of-memory error is about a GPU or the simulated device, not about the host."""
    libraries = ("CUDA", "CUDNN", "NCCL")  # cuBLAS and NCCL name CUDA too
    return isinstance(error, torch.OutOfMemoryError) or any(name in str(error) for name in libraries)


def _on_device(config: RunConfig, machine: MachineFacts) -> str:
    state, limit = bytes_per_rank(config), device_memory(config, machine)
    fixed = state.weights + state.gradients
    more = "more processes (TP, PP)"
    if found := cures(config, machine):
        more += f"; by the plan it fits with {'; or with '.join(map(str, found))}"
    if 0 < limit < fixed:
        lead = f"weights and gradients alone take {size_text(fixed)} of {size_text(limit)}"
        return _sentence([*_shared_gradients(config), more], lead)
    fits = not limit or state.total <= limit
    return _sentence(
        [
            *_fewer_8_bit_weights(config),
            *_fewer_activations(config),
            *_offloaded_activations(config),
            *_shared_states(config),
            *_more_offload(config, limit, fits),
            more,
        ]
    )


def _on_host(config: RunConfig, machine: MachineFacts) -> str:
    more = "more machines (TP, PP)"
    if machine.cuda_devices:
        return _sentence([*_shared_states(config), *_less_offload(config), more])
    _, needed = needed_bytes(config, machine)
    if 0 < machine.host_memory_bytes < needed:
        lead = f"the model's state alone takes {size_text(needed)} of {size_text(machine.host_memory_bytes)}"
        return _sentence([*_shared_states(config), more], lead)
    return _sentence([*_fewer_activations(config), *_shared_states(config), more])


def _sentence(cures: list[str], lead: str = "") -> str:
    *others, last = cures
    take = f"take {', '.join(others)}, or {last}" if others else f"take {last}"
    return f"{lead}: {take}" if lead else take


def _fewer_activations(config: RunConfig) -> list[str]:
    length = "max_padding_length" if config.data.dataset_type == "raw" else "seq_length"
    smaller = "micro_batch_size" if config.training.micro_batch_size > 1 else length
    more: dict[Recompute | None, list[str]] = {
        None: ["selective (sel) or full"],
        "selective": ["full"],
        "full": [],
    }
    training = config.training
    recompute = more[config.recompute]
    if not recompute and training.recompute_method == "block" and not training.cpu_offloading:
        return [f"a smaller {where(smaller)}", f"uniform at {where('recompute_method')}"]
    return [
        f"a smaller {where(smaller)}",
        *(f"{word} at {where('recompute_granularity')}" for word in recompute),
    ]


def _fewer_8_bit_weights(config: RunConfig) -> list[str]:
    return [f"true at {where('disable_parameter_transpose_cache')}"] if config.keeps_8_bit_weights else []


def _offloaded_activations(config: RunConfig) -> list[str]:
    """Activations in host memory, if some are on the device that may go there."""
    training = config.training
    recomputes_all = training.recompute_granularity == "full" and training.recompute_method == "uniform"
    return [] if training.cpu_offloading or recomputes_all else [f"true at {where('cpu_offloading')}"]


def _shared_states(config: RunConfig) -> list[str]:
    """Which states replicas do not share yet; sharing them also saves host memory."""
    if config.num_state_shares > 1 and config.zero_stage is ZeroStage.NONE:
        return [f"true at {where('use_distributed_optimizer')}"]
    return _shared_gradients(config)


def _shared_gradients(config: RunConfig) -> list[str]:
    if config.num_state_shares == 1 or config.zero_stage is ZeroStage.GRADIENTS:
        return []
    return [f"gradients at {where('data_parallel_sharding')}"]


def _more_offload(config: RunConfig, limit: int, fits: bool) -> list[str]:
    """The flags that keep more optimizer states on the host; [] if all states are there already.

    Args:
        config: the run.
        limit: bytes of the device's memory; 0: unknown.
        fits: whether the model's state fits into the device's memory. Then a process that has the whole model
            began to train, and moved all states to the host before it failed.
    """
    optimizer = config.optimizer
    policy = optimizer.optimizer_offload_policy
    is_whole = config.world_size == config.data_parallel_size
    on_host: dict[OffloadPolicy | None, bool] = {
        None: False,
        "static": optimizer.optimizer_offload_fraction == 1 or (is_whole and fits),
        "auto": is_whole or 0 < limit <= optimizer.optimizer_offload_auto_threshold,
    }
    return [] if on_host[policy] else [more_offload(optimizer)]


def more_offload(config: OptimizerConfig) -> str:
    """The flags of optimizer offload that use less device memory."""
    policy = where("optimizer_offload_policy")
    if config.optimizer_offload_policy is None:
        return f"static or auto at {policy}"
    if config.optimizer_offload_policy == "auto":
        return f"a larger {where('optimizer_offload_auto_threshold')}"
    return f"a larger {where('optimizer_offload_fraction')} or auto at {policy}"


def _less_offload(config: RunConfig) -> list[str]:
    fields = {"static": "optimizer_offload_fraction", "auto": "optimizer_offload_auto_threshold"}
    policy = config.optimizer.optimizer_offload_policy
    found = [fields[policy]] if policy else []
    found += ["cpu_offloading_num_layers"] if config.training.cpu_offloading else []
    return [f"less offload (a smaller {where(field)})" for field in found]
