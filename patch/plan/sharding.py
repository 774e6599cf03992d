"""What data-parallel sharding moves and holds, and the choice of `--data-parallel-sharding auto`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import Sharding, ZeroStage
from patch.device import MachineFacts
from patch.plan.memory import bytes_per_rank
from patch.plan.parameters import parameters_per_rank


class StageCost(NamedTuple):
    """One ZeRO stage on the heaviest rank."""

    moved: int
    """Bytes a rank sends in one step: gradients out, weights back."""
    held: int
    """Bytes of weights, gradients and states."""


def stage_cost(config: RunConfig, stage: ZeroStage) -> StageCost:
    """Bytes of one ZeRO stage by arithmetic: ring collectives send (P - 1) / P of what they work on.

    ZeRO-2 reduces in every micro-batch, the others once a step; an all-reduce sends everything twice.
    """
    parameters, replicas = max(parameters_per_rank(config.model, config.parallel)), config.data_parallel_size
    weights = parameters * (4 if config.training.precision == "fp32" else 2)
    gradients = parameters * (4 if config.optimizer.main_grads_dtype == "fp32" else 2)
    sent = {
        ZeroStage.NONE: 2 * gradients,
        ZeroStage.OPTIMIZER: gradients + weights,
        ZeroStage.GRADIENTS: gradients * config.num_micro_batches + weights,
    }[stage]
    return StageCost(sent * (replicas - 1) // replicas, bytes_per_rank(with_sharding(config, stage)).total)


def with_sharding(config: RunConfig, sharding: Sharding) -> RunConfig:
    """The same run at another ZeRO stage, or with the wish that one is chosen."""
    return dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, data_parallel_sharding=sharding)
    )


def resolve_sharding(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the ZeRO stage that suits the run.

    One micro-batch a step: gradients are sharded too, which moves as much as ZeRO-1 and holds less.
    Several: ZeRO-1, which reduces once a step, unless only the higher stage fits the GPU.

    Returns:
        the run with a stage in the place of auto, and one line for each stage: what it would move and hold.
    """
    if config.sharding != "auto":
        return config, []
    costs = {stage: stage_cost(config, stage) for stage in ZeroStage}
    chosen = ZeroStage.GRADIENTS if config.num_micro_batches == 1 else ZeroStage.OPTIMIZER
    if machine.cuda_memory_bytes and costs[chosen].held > machine.cuda_memory_bytes:
        chosen = ZeroStage.GRADIENTS
    if config.data_parallel_size == 1:  # all stages are equal then, and DO=true refuses none
        chosen = ZeroStage.OPTIMIZER if config.parallel.use_distributed_optimizer else ZeroStage.NONE
    lines = [
        f"--data-parallel-sharding auto: {stage.name.lower()} moves {cost.moved / 2**20:.1f} MiB a step and "
        f"holds {cost.held / 2**20:.1f} MiB a rank" + (", chosen" if stage is chosen else "")
        for stage, cost in costs.items()
    ]
    return with_sharding(config, chosen), lines
