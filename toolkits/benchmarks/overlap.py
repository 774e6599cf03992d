"""Measures how well data-parallel communication overlaps with compute, ours and megatron-core's DDP.

    python -m toolkits.benchmarks.overlap [--quick] [--buckets N] [--json FILE]

Two ranks, then four, on one core each, in network namespaces connected by cables of limited speed (needs root
and iproute2). Their layers wait instead of computing, as the host of an accelerator does. All contenders run
alternately in the same processes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.choices import ZeroStage
from patch.config.schema import RunConfig
from patch.device import DeviceContext, MachineFacts
from patch.distributed.async_collectives import Pending, WaitClock, start_all_gather, start_reduce_scatter
from patch.distributed.groups import initialize
from patch.optimizer import OverlappedDistributedOptimizer, domain, param_flat
from patch.plan.parameters import total_parameters
from patch.plan.resolve import resolve_sharding, with_sharding
from toolkits.benchmarks._contenders import Contender, OurTrainer, run_config, time_round
from toolkits.benchmarks._measure import COMMUNICATION, COMPUTE, Rounds, time_on_ranks
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark
from toolkits.benchmarks._rig import Cables, compare, let_layers_wait, way_of
from toolkits.benchmarks._runner import run_ranks
from toolkits.benchmarks._upstream import UpstreamTrainer, prepare_cpu

_SHAPE: dict[str, Any] = {
    "num_layers": 32, "hidden_size": 96, "ffn_hidden_size": 256, "num_attention_heads": 3,
    "num_query_groups": 1, "kv_channels": 32, "vocab_size": 128,
}  # fmt: skip
"""As many layers as LLaMA-3.1 8B. The vocabulary is small, because the embedding has the last gradient and
the first weight, so no compute can overlap with its communication."""

ALL_TO_ALL = "upstream: both, all-to-all"
OURS = {f"ours: {stage.name.lower()}": stage for stage in ZeroStage}
_BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
UPSTREAM: dict[str, dict[str, bool]] = {
    "upstream: no overlap": {},
    "upstream: gradients": {"overlap_grad_reduce": True},
    "upstream: gradients + weights": _BOTH,
    ALL_TO_ALL: {**_BOTH, "reduce_scatter_with_fp32_accumulation": True},
}
_LEFT_OUT = ("ours: none", "upstream: no overlap", "upstream: gradients")
"""Contenders that are not the best at any accumulation: one round of 16 micro-batches takes minutes."""
_BUCKETS = 20
_TIMEOUT_S = 1800


WAIT_S = 0.5
"""Seconds of a micro-batch in all layers."""
_NUM_RANKS = (2, 4)
_FULL = {"1": (7, 2), "4": (3, 1), "16": (3, 1)}
_QUICK = {"1": (2, 2), "4": (1, 1), "16": (1, 1)}
"""Number of accumulated micro-batches -> number of rounds, timed steps per round."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    sizes = "the bucket size is the model's divided by this (default: %(default)s)"
    options: dict[str, dict[str, Any]] = {
        "--buckets": {"type": int, "default": _BUCKETS, "help": sizes},
    }
    return run_benchmark(_run, argv, quick="fewer rounds: about half the time", options=options)


def _run(arguments: argparse.Namespace) -> Report:
    aims: list[Aim] = []
    panels: list[Panel] = []
    reports: dict[str, Any] = {}
    for num_ranks in _NUM_RANKS:
        begin = time.monotonic()
        with Cables(num_ranks) as cables:
            measured = run_ranks(
                measure, num_ranks, _TIMEOUT_S, cables=cables, buckets=arguments.buckets,
                schedule=_QUICK if arguments.quick else _FULL,
            )  # fmt: skip
        print(f"DP={num_ranks}: {way_of(measured['1'])}; {time.monotonic() - begin:.0f} s\n")
        figures = {accumulation: Rounds(found["rounds"]) for accumulation, found in measured.items()}
        for accumulation, found in figures.items():
            title = f"DP={num_ranks}, accumulation {accumulation}"
            panels.append(found.panel(title))
            print(found.table(title, found.best("upstream")), flush=True)
        aims += aims_of(num_ranks, figures)
        reports[f"DP={num_ranks}"] = measured
    return Report("", aims, panels, {"settings": reports})


def _auto_level(num_ranks: int) -> str:
    """The level that `--data-parallel-sharding auto` chooses for the benchmark's run."""
    config = with_sharding(sharded_run(num_ranks, 4), "auto")
    return resolve_sharding(config, MachineFacts.probe())[0].zero_stage.name.lower()


def aims_of(num_ranks: int, figures: dict[str, Rounds]) -> list[Aim]:
    """What the issues ask of so many ranks."""
    auto, aims = f"ours: {_auto_level(num_ranks)}", []
    for accumulation, found in figures.items():
        is_first, where = accumulation == "1", f"DP={num_ranks}, accumulation {accumulation}"
        ours, rival = found.best("ours") if is_first else auto, found.best("upstream")
        name = f"{where}: {ours} / {rival} (perfect overlap: {1 / found.over_bound(rival):.3f})"
        aims.append(Aim(name, found.ratio(ours, rival), 0.90 if is_first else 0.97))
        if is_first:
            aims.append(Aim(f"{where}: {ours} / max(compute, communication)", found.over_bound(ours), 1.05))
    return aims


def sharded_run(num_ranks: int, accumulation: int, buckets: int = _BUCKETS) -> RunConfig:
    """The run that all contenders train: bf16 weights, fp32 gradients.

    Args:
        num_ranks: data-parallel ranks.
        accumulation: micro-batches of a step.
        buckets: of the model, if they were all of one size.
    """
    batch, numel = num_ranks * accumulation, total_parameters(run_config(8, **_SHAPE).model)
    return run_config(
        8, **_SHAPE, nproc_per_node=num_ranks, global_batch_size=batch, reduce_bucket_size=numel // buckets,
        param_persistence_threshold=1000,  # matrices are small, and all of them come and go
        precision="bf16",
    )  # fmt: skip


@contextmanager
def _no_messages() -> Iterator[None]:
    """Gradients and weights arrive at once, in which a rank's own part stands for those of all ranks."""

    def arrived(*unused: Any) -> Pending:
        return Pending([])

    with (
        mock.patch.object(domain, "start_reduce_scatter", arrived),
        mock.patch.object(param_flat, "start_all_gather", arrived),
    ):
        yield


class ComputeAlone(OurTrainer):
    """Our sharded step without its messages."""

    def step(self) -> float:
        """One optimizer step."""
        with _no_messages():
            return super().step()

    def settle(self) -> None:
        """Wait for the updated weights."""
        with _no_messages():
            super().settle()


def communicate(optimizer: OverlappedDistributedOptimizer, num_gathers: int = 1) -> None:
    """The bytes of one sharded step, bucket by bucket: all reductions, then all gathers, once or more."""
    group, clock = optimizer.groups.dp_cp, WaitClock(optimizer.device)
    messages: list[tuple[Callable[..., Pending], torch.dtype]] = [(start_reduce_scatter, torch.float32)]
    messages += [(start_all_gather, optimizer.parameters[0].dtype)] * num_gathers
    for start, dtype in messages:
        started = []
        for one in optimizer.grad_buffer.buckets:
            whole = torch.zeros(one.range.numel, dtype=dtype, device=optimizer.device)
            started.append(start(whole, whole.chunk(group.size())[group.rank()], group))
        for pending in started:
            pending.wait(clock)


def build_contenders(
    config: RunConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
    without: Sequence[str] = (),
) -> dict[str, Contender]:
    """The contenders by name, on this rank; each has its own model with the same first weights.

    Args:
        config: the run that all contenders train.
        groups: the process groups of the job.
        device: the device of this rank.
        without: the names of those that are left out.
    """
    sharded = with_sharding(config, ZeroStage.OPTIMIZER)
    wait = partial(let_layers_wait, wait_s=WAIT_S, rank=dist.get_rank())
    contenders: dict[str, Contender] = {COMPUTE: ComputeAlone(sharded, groups, device, change=wait)}
    for name, stage in OURS.items():
        if name not in without:
            contenders[name] = OurTrainer(with_sharding(config, stage), groups, device, change=wait)
    for name, overlap in UPSTREAM.items():
        if name not in without:
            contenders[name] = UpstreamTrainer(config, groups, device, overlap, change=wait)
    return contenders


def measure(context: DeviceContext, buckets: int, schedule: dict[str, tuple[int, int]]) -> dict[str, Any]:
    """By accumulation: the cable's speed and the seconds of all contenders; equal on all ranks.

    Args:
        context: the device of this rank.
        buckets: see `sharded_run`.
        schedule: see _FULL.
    """
    device, num_ranks = context.device, dist.get_world_size()
    prepare_cpu()
    groups = initialize(sharded_run(num_ranks, 1), context)
    found: dict[str, Any] = {}
    for accumulation, (rounds, steps) in schedule.items():
        config = sharded_run(num_ranks, int(accumulation), buckets)
        without = _LEFT_OUT if int(accumulation) > 1 else ()
        contenders = build_contenders(config, groups, device, without)
        trained = contenders["ours: optimizer"]
        assert isinstance(trained, OurTrainer)
        timed = timed_steps(contenders, steps, partial(communicate, trained.run.optimizer), context)
        found[accumulation] = compare(timed, rounds, share=0.0 if found else 1.0)
    return found


def timed_steps(
    contenders: Mapping[str, Contender], steps: int, messages: Callable[[], None], context: DeviceContext
) -> dict[str, Callable[[], float]]:
    """What takes the seconds of a contender's step, and of its messages alone, by name."""

    def seconds(contender: Contender) -> float:
        return time_round(contender, steps, context.device).seconds

    timed: dict[str, Callable[[], float]] = {
        name: partial(seconds, contender) for name, contender in contenders.items()
    }
    return timed | {COMMUNICATION: partial(time_on_ranks, messages, context)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
