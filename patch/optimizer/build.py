"""Builds the optimizer from its configuration, with the placement policy of offloaded states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.memory.cuda_device import CudaDevice
from patch.memory.disk import DiskMemory
from patch.memory.offload_device import OffloadDevice
from patch.memory.simulated_device import UNLIMITED, SimulatedDevice
from patch.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from patch.optimizer.param_groups import Matrix, ParamGroup
from patch.optimizer.states.offload import Offload
from patch.optimizer.states.placement import AutoPlacementPolicy, StaticPlacementPolicy
from patch.optimizer.trainable_params import check_arguments


def build_optimizer(
    stages: Sequence[torch.nn.Module],
    config: OptimizerConfig,
    zero_stage: ZeroStage,
    groups: ProcessGroupCollection | None = None,
    *,
    param_groups: Sequence[ParamGroup] | None = None,
    host_bytes: int = UNLIMITED,
    model_state: ShardedStateDict | None = None,
    matrices: Mapping[torch.nn.Parameter, Matrix] | None = None,
) -> OverlappedDistributedOptimizer:
    """Build the optimizer of some modules, with its states placed as the configuration says.

    Args:
        stages: the pipeline stages of this rank, or one whole model: `[model]`.
        config: rates, decay, clipping, bucket size, offload.
        zero_stage: what data-parallel ranks shard.
        groups: megatron-core's process groups; None: all ranks of the job are data-parallel.
        param_groups: parameters with weight decay and learning rates; None: `default_param_groups`, in which
            only parameters of two or more dimensions decay (no norms, biases, or other vectors).
        host_bytes: host memory of this process for offloaded states.
        model_state: the model's sharded_state_dict, whose entries hold the parameters themselves. It gives
            bf16 moments the same bits in every layout. None: parameters are whole and identified by name.
        matrices: of which matrices parameters are made, if matrices are updated whole. None: each parameter
            is one matrix.
    Raises:
        ConfigError: an argument is invalid, a parameter cannot be trained, or is not in one parameter group.
        torch.OutOfMemoryError: --simulated-device-memory is too small for buffers that must be on the device.
        TrainingError: --offload-folder has no room for the states.
    """
    check_arguments(stages, zero_stage)
    device = next(chain.from_iterable(stage.parameters() for stage in stages), torch.empty(0)).device
    offload = _build_offload(config, device, host_bytes)
    optimizer = OverlappedDistributedOptimizer(
        stages, config, zero_stage, groups or _data_parallel_groups(), offload, param_groups, model_state,
        matrices,
    )  # fmt: skip
    if offload is not None and isinstance(offload.device, SimulatedDevice):
        optimizer.count_on(offload.device)
    return optimizer


def _data_parallel_groups() -> ProcessGroupCollection:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    return ProcessGroupCollection(dp_cp=dist.group.WORLD, tp=alone, mp=alone, embd=alone)


def _build_offload(config: OptimizerConfig, device: torch.device, host_bytes: int) -> Offload | None:
    if config.optimizer_offload_policy is None:
        return None
    gpu = CudaDevice(device) if device.type == "cuda" else None
    offload_device: OffloadDevice = gpu or SimulatedDevice(config.simulated_device_memory or UNLIMITED)
    policy = (
        StaticPlacementPolicy(config.optimizer_offload_fraction)
        if config.optimizer_offload_policy == "static"
        else AutoPlacementPolicy(config.optimizer_offload_auto_threshold)
    )
    disk = None if config.offload_folder is None else DiskMemory(Path(config.offload_folder))
    is_measured = config.optimizer_offload_streamed is None and config.optimizer_offload_policy == "auto"
    streamed = None if is_measured else config.optimizer_offload_streamed or 0.0
    streams = gpu and CudaDevice(device, "streamed states", gpu)
    return Offload(
        offload_device, policy, config.optimizer_offload_chunk_size or 0, host_bytes, disk,
        config.host_state_bytes(host_bytes), streamed, streams,
    )  # fmt: skip
