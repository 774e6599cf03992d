"""What data-parallel sharding moves and holds, and the choice of `--data-parallel-sharding auto`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan.memory import bytes_per_rank
from patch.plan.parameters import parameters_per_rank

LEVELS = ("none", "optimizer", "gradients")


class LevelCost(NamedTuple):
    """One sharding level on the heaviest rank."""

    moved: int
    """Bytes a rank sends in one step: gradients out, weights back."""
    held: int
    """Bytes of weights, gradients and states."""


def level_cost(config: RunConfig, level: str) -> LevelCost:
    """Bytes of one level by arithmetic: ring collectives send (P - 1) / P of what they work on.

    ZeRO-2 reduces in every micro-batch, the others once a step; an all-reduce sends everything twice.
    """
    parameters, replicas = max(parameters_per_rank(config)), config.data_parallel_size
    weights = parameters * (4 if config.training.precision == "fp32" else 2)
    gradients = parameters * (4 if config.optimizer.main_grads_dtype == "fp32" else 2)
    sent = {
        "none": 2 * gradients,
        "optimizer": gradients + weights,
        "gradients": gradients * config.num_micro_batches + weights,
    }[level]
    return LevelCost(sent * (replicas - 1) // replicas, bytes_per_rank(with_level(config, level)).total)


def with_level(config: RunConfig, level: str) -> RunConfig:
    """The same run at one sharding level."""
    return dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, data_parallel_sharding=level)
    )


def resolve_sharding(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the level that suits the run.

    One micro-batch a step: gradients are sharded too, which moves as much as ZeRO-1 and holds less.
    Several: ZeRO-1, which reduces once a step, unless only the smaller level fits the GPU.

    Returns:
        the run with a level in the place of auto, and one line for each level: what it would move and hold.
    """
    if config.sharding_level != "auto":
        return config, []
    costs = {level: level_cost(config, level) for level in LEVELS}
    level = "gradients" if config.num_micro_batches == 1 else "optimizer"
    if machine.cuda_memory_bytes and costs[level].held > machine.cuda_memory_bytes:
        level = "gradients"
    if config.data_parallel_size == 1:  # all levels are equal then, and DO=true refuses none
        level = "optimizer" if config.parallel.use_distributed_optimizer else "none"
    lines = [
        f"--data-parallel-sharding auto: {name} moves {cost.moved / 2**20:.1f} MiB a step and holds "
        f"{cost.held / 2**20:.1f} MiB a rank" + (", chosen" if name == level else "")
        for name, cost in costs.items()
    ]
    return with_level(config, level), lines
