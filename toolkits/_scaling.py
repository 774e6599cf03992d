"""`llama-patch plan --scaling`: LLaMA 8B, 70B and 405B on 8 to 16384 GPUs of slightly different speeds.

The global batch is LLaMA-3's largest, 2048 samples of 8192 tokens. With more than 2048 replicas it is one
sample per replica. So more GPUs accumulate fewer micro-batches, which hide less communication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import NamedTuple

from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.fits import fit_of
from patch.plan.planned_run import PlannedRun, machine_named, plan_run
from patch.plan.timing.step_time import step_time

COUNTS = [2**power for power in range(3, 15)]
"""Numbers of GPUs."""
LAYOUTS = {
    "8B": (2, "--tensor-model-parallel-size 2"),
    "70B": (
        32,
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 "
        "--num-layers-per-virtual-pipeline-stage 2",
    ),
    # The layout of LLaMA-3's own training: arXiv 2407.21783, table 4, rows without CP.
    "405B": (
        128,
        "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 "
        "--num-layers-per-virtual-pipeline-stage 1 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --recompute-granularity selective",
    ),
}
"""MODEL_SIZE -> GPUs of a replica, flags. All runs also use SP and ZeRO-1. They fit an H100."""
PER_INSTANCE = 64
"""Ranks of each instance of the distributed optimizer, if there are several instances. Ranks of an instance
shard the states; the instances all-reduce their shards' gradients."""
VARIANTS = {"one instance": False, f"instances of {PER_INSTANCE}": True}
"""Title of a compared variant -> whether the distributed optimizer has several instances."""
_LENGTH, _SAMPLES = 8192, 2048


class Point(NamedTuple):
    """A planned step on a number of GPUs."""

    gpus: int
    micro_batches: int
    """Micro-batches per replica and step."""
    seconds: float
    mfu: float


def run(machine: str, counts: Sequence[int] = COUNTS) -> int:
    """Print the MFU in percent of each model and variant, and return the exit code 0.

    Args:
        machine: kind of the nodes and of the network, as `plan_run` takes it.
        counts: numbers of GPUs.
    Raises:
        ConfigError: the machine is unknown, or has no GPUs.
    """
    node = machine_named(machine, MachineFacts.probe(), 1)
    if not node.is_gpu:
        raise ConfigError(f"--scaling: got {node.name}, expected a machine with GPUs (--machine h100)")
    print(f"Planned, not measured: {node.name}; 2048 samples of 8192 tokens a step, or one a replica")
    print(f"{'model':<6}{'GPUs':>7}{'micro-batches':>15}{'s a step':>10}   MFU in %: {', '.join(VARIANTS)}")
    for size in LAYOUTS:
        curves = [scaling(size, machine, counts, has_instances=has) for has in VARIANTS.values()]
        for points in zip(*curves, strict=True):
            gpus, micro_batches, seconds, _ = points[0]
            line = f"{size:<6}{gpus:>7}{micro_batches:>15}{seconds:>10.2f}   "
            print(line + "".join(f"{100 * point.mfu:>8.1f}" for point in points))
    return 0


def slowest_of(count: int) -> float:
    """Return the expected maximum of `count` independent standard normal draws, in standard deviations.

    Blom's approximation, the quantile at (n - 3/8) / (n + 1/4), is within 2 % of the exact value.
    """
    return 0.0 if count == 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def slowdown(num_ranks: int, num_passes: int, of_devices: float = 0.01, of_passes: float = 0.01) -> float:
    """Return the factor on compute time if all ranks wait for each other once every `num_passes` passes.

    The n passes of a rank have the relative deviation sqrt(d^2 + p^2 / n). The slowest of N ranks takes
    1 + slowest_of(N) * deviation times as long.

    Args:
        num_ranks: N.
        num_passes: n.
        of_devices: d, standard deviation between devices, as a share of a pass's time. It is the same in
            every pass: clocks that power and temperature limit. The defaults of d and p are assumed.
        of_passes: p, standard deviation between passes of one device: host, memory, other work.
    """
    return 1.0 + slowest_of(num_ranks) * math.hypot(of_devices, of_passes / math.sqrt(num_passes))


def scaling(size: str, machine: str, counts: Sequence[int], *, has_instances: bool = False) -> list[Point]:
    """Return the planned steps of a model on these numbers of GPUs.

    A number is left out if the model does not fit, or if it has fewer than two replicas.

    Args:
        size: a key of `LAYOUTS`.
        machine: kind of the nodes and of the network, as `plan_run` takes it.
        counts: numbers of GPUs.
        has_instances: whether the distributed optimizer has several instances.
    """
    here, of_replica = MachineFacts.probe(), LAYOUTS[size][0]
    points = []
    for gpus in counts:
        if gpus < 2 * of_replica:
            continue
        planned = scaled_run(size, machine, gpus, here, has_instances=has_instances)
        config, node = planned.resolved, planned.machine
        if not fit_of(config, node.facts).is_whole:
            continue
        step = step_time(config, node)
        passes = 2 * config.virtual_pipeline_size * config.num_micro_batches
        seconds = step.seconds + step.computing * (slowdown(gpus, passes) - 1)
        mfu = step.model_flops * step.seconds / seconds / node.peak_flops(config.training.precision)
        points.append(Point(gpus, config.num_micro_batches, seconds, mfu))
    return points


def scaled_run(
    size: str, machine: str, gpus: int, here: MachineFacts, *, has_instances: bool = False
) -> PlannedRun:
    """Return the planned run of a model on this number of GPUs.

    Args:
        size, machine, has_instances: see `scaling`.
        gpus: a multiple of the GPUs of a replica.
        here: this machine.
    """
    of_replica, flags = LAYOUTS[size]
    replicas, per_node = gpus // of_replica, min(gpus, machine_named(machine, here, 1).devices_per_node)
    argv = (
        f"--model-size {size} --seq-length {_LENGTH} --global-batch-size {max(_SAMPLES, replicas)} "
        f"--sequence-parallel --use-distributed-optimizer {flags}"
    )
    if has_instances:
        argv += f" --num-distributed-optimizer-instances {max(1, replicas // PER_INSTANCE)}"
    return plan_run(argv.split(), machine, gpus // per_node, per_node, here=here)
