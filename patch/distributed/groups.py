"""Process groups of a run, built once by megatron-core's parallel_state, passed as ProcessGroupCollection.

The rank order is --rank-order; by default megatron-core's: TP fastest, then CP, DP, PP.

The experts divide the same ranks anew, without CP: ETP ranks share an expert, EP ranks have other experts
of the layer, EDP ranks have replicas of an expert. Pipelines are the same; EP may span TP, CP and DP.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from patch.checks.experts import experts_share_pipelines
from patch.compat.overhead import shared_devices
from patch.config.experts import ExpertsConfig
from patch.config.schema import ParallelConfig, RunConfig
from patch.device import DeviceContext
from patch.errors import ConfigError
from patch.launch.job import join
from patch.launch.worker_process import DETERMINISTIC

_OF_EXPERTS = ("ep", "expt_tp", "expt_dp", "intra_expt_dp", "tp_ep", "tp_ep_pp")
"""Groups that a run without experts does not have."""


def initialize(config: RunConfig, context: DeviceContext) -> ProcessGroupCollection:
    """Join the job (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), build its groups, seed the generators.

    Deterministic mode is enabled first, because NCCL reads NCCL_ALGO only at its start. If a test or an
    embedding program has already initialized torch.distributed, that job is used.

    Raises:
        ConfigError: the number of processes differs from the configuration's, or does not suit the experts.
        TrainingError: the job could not be joined.
    """
    if config.training.deterministic_mode:
        _use_deterministic_algorithms()
    if not dist.is_initialized():
        join(context.backend, timedelta(minutes=config.parallel.distributed_timeout_minutes))
    if dist.get_world_size() != config.world_size:
        raise ConfigError(
            f"this job has {dist.get_world_size()} processes, the configuration expects {config.world_size} "
            "(--nnodes x --nproc-per-node): give the number that torchrun starts"
        )
    experts_share_pipelines(config)
    experts = config.experts if config.model.num_experts else None
    return _build_groups(config.parallel, config.training.seed, experts)


def _build_groups(
    parallel: ParallelConfig, seed: int, experts: ExpertsConfig | None = None
) -> ProcessGroupCollection:
    """Build the groups; expert groups only if the model has experts."""
    etp_size = (experts or ExpertsConfig()).etp_size(parallel.tensor_model_parallel_size)
    order = "-".join(parallel.rank_axes).replace("cp", "cp-ep")
    if experts is None:
        # Upstream always builds expert groups, and refuses an order in which the experts' pipelines differ
        # from the model's (parallel_state.py:808-817). EP in the place of CP makes the pipelines equal.
        ep_size = 1 if order.endswith("pp") else parallel.context_parallel_size
    else:
        ep_size = experts.expert_model_parallel_size
        order = parallel.order_of_experts
    with shared_devices():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor_model_parallel_size,
            pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
            context_parallel_size=parallel.context_parallel_size,
            expert_model_parallel_size=ep_size,
            expert_tensor_parallel_size=etp_size,
            distributed_timeout_minutes=parallel.distributed_timeout_minutes,
            order=order,
            create_gloo_process_groups=False,  # additional groups, which only megatron-core's optimizer uses
        )
        groups = ProcessGroupCollection.use_mpu_process_groups()
        split_instances(groups, parallel.num_distributed_optimizer_instances)
    for name in _OF_EXPERTS if experts is None else ():
        delattr(groups, name)
    seed_generators(seed)
    return groups


def split_instances(groups: ProcessGroupCollection, num_instances: int) -> None:
    """Divide the data-parallel ranks (with CP) into instances of the distributed optimizer.

    An instance has contiguous ranks of `dp_cp`, so that it stays inside a node if ranks are numbered by
    nodes. Sets `intra_dp_cp`, the ranks of an instance, and `inter_dist_opt`, the ranks with the same index
    in all instances. Upstream's option of initialize_model_parallel divides the experts' ranks instead
    (parallel_state.py:1287), which differ if CP > 1. All data-parallel ranks call this.

    Args:
        groups: the process groups, changed in place.
        num_instances: a divisor of the number of data-parallel ranks; 1 changes nothing.
    """
    if num_instances == 1:
        return
    ranks = dist.get_process_group_ranks(groups.dp_cp)
    size = len(ranks) // num_instances
    own, place = divmod(groups.dp_cp.rank(), size)
    # Only members synchronize; each rank creates its two groups in the same order.
    instance = ranks[own * size : (own + 1) * size]
    groups.intra_dp_cp = dist.new_group(instance, use_local_synchronization=True)
    groups.inter_dist_opt = dist.new_group(ranks[place::size], use_local_synchronization=True)


def seed_generators(seed: int) -> None:
    """Seed this rank's generators: torch's equally on all ranks, the tracker's by TP rank.

    Sequence parallelism and recomputation use the tracker.
    """
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def _use_deterministic_algorithms() -> None:
    for name, value in DETERMINISTIC.items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)


@contextmanager
def alone(context: DeviceContext) -> Iterator[ProcessGroupCollection]:
    """Context with the process groups of a single-process program without a launcher.

    An existing job is used, and not destroyed at the end.

    Raises:
        ConfigError: the existing job has several processes.
    """
    is_own = not dist.is_initialized()
    if is_own:
        dist.init_process_group(context.backend, store=dist.HashStore(), rank=0, world_size=1)
    if dist.get_world_size() != 1:
        raise ConfigError(
            f"this job has {dist.get_world_size()} processes, expected 1; start the program without torchrun"
        )
    try:
        yield _build_groups(ParallelConfig(nproc_per_node=1), 0, ExpertsConfig())
    finally:
        parallel_state.destroy_model_parallel()
        if is_own:
            dist.destroy_process_group()


def shutdown() -> None:
    """Leave the groups and the job; also safe if the job was never joined."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
