"""Communication and memory of data-parallel sharding, and the choice of `--data-parallel-sharding auto`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import Sharding, ZeroStage
from patch.device import MachineFacts
from patch.plan.memory import bytes_per_rank, gathered_bytes
from patch.plan.parameters import element_bytes, parameters_per_rank


class StageCost(NamedTuple):
    """Communication and memory of one ZeRO stage, on the heaviest rank."""

    moved: int
    """Bytes that a rank sends in one step: gradients and updated weights."""
    held: int
    """Bytes of weights, gradients and optimizer states in the rank's memory."""


def stage_cost(config: RunConfig, stage: ZeroStage) -> StageCost:
    """Communication and memory of one ZeRO stage.

    A ring collective over P ranks sends (P - 1) / P of its data, an all-reduce twice that. ZeRO-2 reduces in
    every micro-batch, the other stages once a step. Several instances of the distributed optimizer share
    inside each of them, and sum the shards of all of them once a step.
    """
    parameters = max(parameters_per_rank(config.model, config.parallel))
    shares, copies = config.num_state_shares, config.num_weight_copies
    instances = copies // shares
    weights = gathered_bytes(with_sharding(config, stage))
    gradients = parameters * element_bytes(config.optimizer.main_grads_dtype)
    if stage is ZeroStage.NONE:
        sent = 2 * gradients * (copies - 1) // copies
    else:
        travelling = parameters * 2 if config.optimizer.grad_reduce_in_bf16 else gradients
        reductions = config.num_micro_batches if stage is ZeroStage.GRADIENTS else 1
        sent = (travelling * reductions + weights) * (shares - 1) // shares
        sent += 2 * gradients * (instances - 1) // copies
    return StageCost(sent, bytes_per_rank(with_sharding(config, stage)).total)


def with_sharding(config: RunConfig, sharding: Sharding) -> RunConfig:
    """The same run with another ZeRO stage, or with `auto`."""
    return dataclasses.replace(
        config, parallel=dataclasses.replace(config.parallel, data_parallel_sharding=sharding)
    )


def resolve_sharding(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the ZeRO stage that suits the run.

    With one micro-batch a step it is ZeRO-2, which sends as much as ZeRO-1 and needs less memory. With
    several it is ZeRO-1, which reduces once a step, unless only ZeRO-2 fits the GPU.

    Returns:
        the run with a stage instead of auto, and one line for each stage about its communication and memory.
    """
    if config.sharding != "auto":
        return config, []
    costs = {stage: stage_cost(config, stage) for stage in ZeroStage}
    chosen = ZeroStage.GRADIENTS if config.num_micro_batches == 1 else ZeroStage.OPTIMIZER
    if machine.cuda_memory_bytes and costs[chosen].held > machine.cuda_memory_bytes:
        chosen = ZeroStage.GRADIENTS
    if config.num_state_shares == 1:  # all stages need the same; take the one that DO allows
        chosen = ZeroStage.OPTIMIZER if config.parallel.use_distributed_optimizer else ZeroStage.NONE
    lines = [
        f"--data-parallel-sharding auto: {stage.name.lower()} moves {cost.moved / 2**20:.1f} MiB a step and "
        f"holds {cost.held / 2**20:.1f} MiB a rank" + (", chosen" if stage is chosen else "")
        for stage, cost in costs.items()
    ]
    return with_sharding(config, chosen), lines
