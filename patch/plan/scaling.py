"""How efficiently LLaMA trains on more and more GPUs, by plan, where ranks are not equally fast.

The batch is LLaMA-3's largest, 2048 samples of 8192 tokens, until every replica has one sample in a step;
beyond that it grows with the replicas. So more GPUs accumulate fewer micro-batches, which hide less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any, NamedTuple

from patch.config import ModelConfig, ParallelConfig, RunConfig
from patch.config.schema import CheckpointConfig, DataConfig, OptimizerConfig, TrainingConfig
from patch.families import PRESETS
from patch.plan.activation_peak import heaviest_rank
from patch.plan.flops import flops_per_step
from patch.plan.memory import usable_device_memory
from patch.plan.timing.machine import Machine
from patch.plan.timing.step_time import step_time

LENGTH, SAMPLES = 8192, 2048
LAYOUTS: dict[str, dict[str, Any]] = {
    "8B": {"tensor_model_parallel_size": 2},
    "70B": {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 4,
        "num_layers_per_virtual_pipeline_stage": 2,
    },
    # That of LLaMA-3's own training (arXiv 2407.21783, table 4, its rows without CP)
    "405B": {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 16,
        "num_layers_per_virtual_pipeline_stage": 1,
        "account_for_embedding_in_pipeline_split": True,
        "account_for_loss_in_pipeline_split": True,
    },
}
"""Fields of ParallelConfig by MODEL_SIZE; sequence parallelism and ZeRO-1 besides. They fit an H100."""
_SELECTIVE = ("405B",)
"""Those that recompute norms and SwiGLU (AC=sel)."""
_AXES = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
_PER_INSTANCE = 64
"""Ranks that share states where there are several instances of the distributed optimizer."""


class Variant(NamedTuple):
    """What is compared."""

    title: str
    has_instances: bool
    """States are shared by 64 ranks, and sums of their shards exchanged across."""


VARIANTS = (
    Variant("one instance", False),
    Variant(f"instances of {_PER_INSTANCE}", True),
)


class Point(NamedTuple):
    """A step on a number of GPUs."""

    gpus: int
    micro_batches: int
    """Micro-batches of a replica in a step."""
    seconds: float
    mfu: float
    efficiency: float
    """Share of the step in which the process that computes longest computes, as if it were alone."""


class Spread(NamedTuple):
    """Standard deviations, as shares of a pass's time; both are assumed unless they were measured."""

    of_devices: float = 0.01
    """Between devices, the same in every pass: clocks that power and temperature limit."""
    of_passes: float = 0.01
    """Between passes of one device: the host, memory, other work."""


def slowest_of(count: int) -> float:
    """The expected maximum of independent standard normal draws, in standard deviations.

    Blom's approximation, the quantile at (n - 3/8) / (n + 1/4): within 2 % of the exact value.
    """
    return 0.0 if count == 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def slowdown(spread: Spread, num_ranks: int, num_passes: int) -> float:
    """The factor on compute when all ranks wait for each other once in so many passes.

    A rank's n passes together have the relative deviation sqrt(d^2 + p^2 / n), d between devices and p
    between passes; the slowest of N ranks takes 1 + slowest_of(N) times as much.
    """
    deviation = math.hypot(spread.of_devices, spread.of_passes / math.sqrt(num_passes))
    return 1.0 + slowest_of(num_ranks) * deviation


def scaling(
    size: str, machine: Machine, counts: Sequence[int], variant: Variant = VARIANTS[0]
) -> Iterator[Point]:
    """The steps of a model on these numbers of GPUs.

    Those on which it does not fit, or that are too few for two replicas, are left out.

    Args:
        size: of `LAYOUTS`.
        machine: what a node is, and the links; its number of nodes does not count.
        counts: of GPUs.
        variant: of instances.
    """
    for gpus in counts:
        if gpus < 2 * math.prod(LAYOUTS[size].get(axis, 1) for axis in _AXES):
            continue
        config = scaled_run(size, machine, gpus, variant)
        if not _fits(config, machine):
            continue
        step = step_time(config, machine)
        passes = 2 * config.virtual_pipeline_size * config.num_micro_batches
        seconds = step.seconds + step.computing * (slowdown(Spread(), gpus, passes) - 1)
        flops = flops_per_step(config).model / seconds / gpus
        mfu = flops / machine.peak_flops(config.training.precision)
        yield Point(gpus, config.num_micro_batches, seconds, mfu, step.computing / seconds)


def _fits(config: RunConfig, machine: Machine) -> bool:
    """Whether a device has room; more micro-batches than fill the pipeline need no more of it."""
    rounds = min(config.num_micro_batches, 2 * config.parallel.pipeline_model_parallel_size)
    fewer = replace(config.training, global_batch_size=config.data_parallel_size * rounds)
    needed = heaviest_rank(replace(config, training=fewer), cuda=True).total
    return needed <= usable_device_memory(config, machine.facts)


def scaled_run(size: str, machine: Machine, gpus: int, variant: Variant = VARIANTS[0]) -> RunConfig:
    """The run of a model on so many GPUs.

    Args:
        size: of `LAYOUTS`.
        machine: what a node is.
        gpus: a multiple of the layout's.
        variant: of instances.
    """
    layout, per_node = LAYOUTS[size], min(gpus, machine.devices_per_node)
    tp_size, pp_size = (layout.get(axis, 1) for axis in _AXES)
    replicas = gpus // (tp_size * pp_size)
    parallel = ParallelConfig(
        **layout,
        nnodes=gpus // per_node,
        nproc_per_node=per_node,
        sequence_parallel=tp_size > 1,
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=max(1, replicas // _PER_INSTANCE) if variant.has_instances else 1,
    )
    batch = max(SAMPLES, replicas)
    return RunConfig(
        model=ModelConfig(seq_length=LENGTH, **PRESETS[size]),
        parallel=parallel,
        training=TrainingConfig(
            micro_batch_size=1,
            global_batch_size=batch,
            train_iters=1,
            precision="bf16",
            recompute_granularity="selective" if size in _SELECTIVE else None,
        ),
        optimizer=OptimizerConfig(lr=1e-4),
        data=DataConfig(train_data_path="none", max_padding_length=LENGTH),
        checkpoint=CheckpointConfig(output_path="none"),
    )
