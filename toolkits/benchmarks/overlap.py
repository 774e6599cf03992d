"""Measure the overlap of data-parallel communication with compute: our optimizer, megatron-core's DDP.

    python -m toolkits.benchmarks overlap [--quick] [--json FILE]

Two ranks, then four, on one core each, in network namespaces connected by cables of limited speed (needs root
and iproute2). Their layers wait instead of computing, as the host of an accelerator does. Contenders take
turns in the same processes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.compat import RELEASE
from patch.config.choices import ZeroStage
from patch.config.schema import RunConfig
from patch.device import DeviceContext, MachineFacts
from patch.distributed.async_collectives import CommHandle, WaitClock, start_all_gather, start_reduce_scatter
from patch.distributed.collectives import max_over_world
from patch.distributed.groups import initialize
from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.buckets import buffer_group, flat_params
from patch.plan.parameters import total_parameters
from patch.plan.resolve import resolve_sharding, with_sharding
from toolkits.benchmarks._contenders import Contender, OurTrainer, UpstreamTrainer, run_config, time_round
from toolkits.benchmarks._measure import run_ranks, take_turns, time_call
from toolkits.benchmarks._report import COMMUNICATION, COMPUTE, Aim, Report, Rounds
from toolkits.benchmarks._rig import MANY_TIMES, connected, let_layers_wait, set_speed

_SHAPE: dict[str, Any] = {
    "num_layers": 32, "hidden_size": 96, "ffn_hidden_size": 256, "num_attention_heads": 3,
    "num_query_groups": 1, "kv_channels": 32, "vocab_size": 128,
}  # fmt: skip
"""The model has as many layers as LLaMA-3.1 8B, and a small vocabulary. The embedding has the last gradient
and the first weight, so its communication cannot overlap with compute."""

ALL_TO_ALL = "upstream: both, all-to-all"
OURS = {f"ours: {stage.name.lower()}": stage for stage in ZeroStage}
_BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
UPSTREAM: dict[str, dict[str, Any]] = {
    "upstream: no overlap": {},
    "upstream: gradients": {"overlap_grad_reduce": True},
    "upstream: gradients + weights": _BOTH,
    ALL_TO_ALL: {**_BOTH, "reduce_scatter_with_fp32_accumulation": True},
}
if RELEASE >= (0, 19):
    # Half the bytes, but other rounding than the other contenders.
    _IN_BF16 = {"grad_reduce_in_fp32": False, "param_name_patterns_for_fp32_local_accumulation": ("all",)}
    UPSTREAM["upstream: both, bf16 messages"] = {**_BOTH, **_IN_BF16}
_LEFT_OUT = ("ours: none", "upstream: no overlap", "upstream: gradients")
"""Contenders that are slower at every accumulation: a round of 16 micro-batches takes minutes."""
_BUCKETS = 20
"""Number of buckets if all had the same size."""
WAIT_S = 0.5
"""Seconds per micro-batch for all layers."""
_TIMEOUT_S = 1800
_NUM_RANKS = (2, 4)
_FULL = {"1": (7, 2), "4": (3, 1), "16": (3, 1)}
_QUICK = {"1": (2, 2), "4": (1, 1), "16": (1, 1)}
"""Number of accumulated micro-batches -> number of rounds, timed steps per round."""


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    aims: list[Aim] = []
    reports: dict[str, Any] = {}
    schedule = _QUICK if arguments.quick else _FULL
    for num_ranks in _NUM_RANKS:
        with connected(num_ranks) as namespaces:
            measured = run_ranks(measure, num_ranks, _TIMEOUT_S, namespaces=namespaces, schedule=schedule)
        print(f"DP={num_ranks}: cables of {measured['1']['mbit']:.0f} Mbit/s each way\n")
        figures = {accumulation: Rounds(found["rounds"]) for accumulation, found in measured.items()}
        for accumulation, found in figures.items():
            title = f"DP={num_ranks}, accumulation {accumulation}"
            print(found.table(title, found.best("upstream")), flush=True)
        aims += aims_of(num_ranks, figures)
        reports[f"DP={num_ranks}"] = measured
    return Report("", aims, {"settings": reports})


def aims_of(num_ranks: int, figures: dict[str, Rounds]) -> list[Aim]:
    """Return the aims for this number of ranks."""
    config = with_sharding(sharded_run(num_ranks, 4), "auto")
    stage = resolve_sharding(config, MachineFacts.probe())[0].zero_stage
    auto, aims = f"ours: {stage.name.lower()}", []
    for accumulation, found in figures.items():
        is_first, where = accumulation == "1", f"DP={num_ranks}, accumulation {accumulation}"
        ours, rival = found.best("ours") if is_first else auto, found.best("upstream")
        name = f"{where}: {ours} / {rival} (perfect overlap: {1 / found.over_bound(rival):.3f})"
        aims.append(Aim(name, found.ratio(ours, rival), 0.90 if is_first else 0.97))
        if is_first:
            aims.append(Aim(f"{where}: {ours} / max(compute, communication)", found.over_bound(ours), 1.05))
    return aims


def sharded_run(num_ranks: int, accumulation: int) -> RunConfig:
    """Return the run that all contenders train: bf16 weights, fp32 gradients."""
    numel = total_parameters(run_config(8, **_SHAPE).model)
    return run_config(
        8, **_SHAPE, nproc_per_node=num_ranks, global_batch_size=num_ranks * accumulation,
        reduce_bucket_size=numel // _BUCKETS, precision="bf16",
        param_persistence_threshold=1000,  # matrices are small, and all of them must be freed and gathered
    )  # fmt: skip


@contextmanager
def _no_messages() -> Iterator[None]:
    """Let gradients and weights arrive at once; a rank's own shard stands for the shards of all ranks."""

    def arrived(*unused: Any) -> CommHandle:
        return CommHandle([])

    patch = mock.patch.object
    with (
        patch(buffer_group, "start_reduce_scatter", arrived),
        patch(flat_params, "start_all_gather", arrived),
    ):
        yield


class ComputeAlone(OurTrainer):
    """Our sharded step without its communication."""

    def step(self) -> float:
        """Take one optimizer step; return the loss."""
        with _no_messages():
            return super().step()

    def settle(self) -> None:
        """Wait for the updated weights."""
        with _no_messages():
            super().settle()


def communicate(optimizer: OverlappedDistributedOptimizer, num_gathers: int = 1) -> None:
    """Send the bytes of one sharded step, bucket by bucket: all reduce-scatters, then all all-gathers."""
    group, clock = optimizer.groups.dp_cp, WaitClock(optimizer.device)
    messages: list[tuple[Callable[..., CommHandle], torch.dtype]] = [(start_reduce_scatter, torch.float32)]
    messages += [(start_all_gather, optimizer.parameters[0].dtype)] * num_gathers
    for start, dtype in messages:
        started = []
        for one in optimizer.grad_buffer.buckets:
            whole = torch.zeros(one.range.numel, dtype=dtype, device=optimizer.device)
            started.append(start(whole, whole.chunk(group.size())[group.rank()], group))
        for pending in started:
            pending.wait(clock)


def build_contenders(
    config: RunConfig, groups: ProcessGroupCollection, device: torch.device, without: Sequence[str] = ()
) -> dict[str, Contender]:
    """Build the contenders on this rank. Each has its own model with the same initial weights.

    Args:
        config: the run that all contenders train.
        without: names of contenders that are left out.
    """
    wait = partial(let_layers_wait, wait_s=WAIT_S, rank=dist.get_rank())
    builds: dict[str, Callable[..., Contender]] = {
        COMPUTE: partial(ComputeAlone, with_sharding(config, ZeroStage.OPTIMIZER)),
        **{name: partial(OurTrainer, with_sharding(config, stage)) for name, stage in OURS.items()},
        **{name: partial(UpstreamTrainer, config, overlap=overlap) for name, overlap in UPSTREAM.items()},
    }
    return {
        name: build(groups=groups, device=device, change=wait)
        for name, build in builds.items()
        if name not in without
    }


def measure(context: DeviceContext, schedule: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """Return by accumulation the cable's speed and the seconds of all contenders, equal on all ranks.

    Args:
        schedule: see `_FULL`.
    """
    num_ranks, mbit = dist.get_world_size(), 0.0
    groups = initialize(sharded_run(num_ranks, 1), context)
    found: dict[str, Any] = {}
    for accumulation, (rounds, steps) in schedule.items():
        without = _LEFT_OUT if int(accumulation) > 1 else ()
        config = sharded_run(num_ranks, int(accumulation))
        contenders = build_contenders(config, groups, context.device, without)
        trained = contenders["ours: optimizer"]
        assert isinstance(trained, OurTrainer)
        messages = partial(communicate, trained.run.optimizer)
        found[accumulation] = compare(contenders, messages, rounds, steps, context, mbit)
        mbit = found[accumulation]["mbit"]
    return found


def compare(
    contenders: Mapping[str, Contender],
    messages: Callable[[], None],
    rounds: int,
    steps: int,
    context: DeviceContext,
    mbit: float = 0.0,
) -> dict[str, Any]:
    """Time the rounds of contenders over a cable; return its speed and the seconds.

    Args:
        contenders: by name, including compute alone.
        messages: sends the messages of a step.
        steps: timed steps per round.
        mbit: speed of the cable, or 0 to choose it so that messages take as long as compute alone.
    """

    def communication() -> float:
        dist.barrier()
        return max_over_world([time_call(messages, context).wall], context.device)[0]

    def step_of(contender: Contender) -> float:
        return time_round(contender, steps, context.device)[0]

    seconds = {name: partial(step_of, contender) for name, contender in contenders.items()}
    calls: dict[str, Callable[[], float]] = {**seconds, COMMUNICATION: communication}
    if not mbit:
        for step in calls.values():  # untimed: the first step builds buffers
            step()
        mbit = set_speed(communication, min(calls[COMPUTE]() for _ in range(MANY_TIMES)))
    return {"mbit": mbit, "rounds": take_turns(calls, rounds)}
