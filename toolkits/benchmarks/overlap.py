"""Measures how well data-parallel communication overlaps with compute, ours and megatron-core's DDP.

    python -m toolkits.benchmarks.overlap [--quick] [--layers LAYERS] [--buckets N] [--mbit SPEED] [--json F]
        [--plot F]

Without two GPUs: ranks in network namespaces connected by cables of limited speed (needs root and iproute2);
two ranks on one core each whose layers compute, then two and four whose layers wait. With two GPUs: two NCCL
ranks. All contenders run alternately in the same processes.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.choices import ZeroStage
from patch.config.schema import ModelConfig, ParallelConfig, RunConfig
from patch.device import DeviceContext, MachineFacts
from patch.distributed.async_collectives import WaitClock, start_all_gather, start_reduce_scatter
from patch.distributed.groups import initialize
from patch.optimizer import OverlappedDistributedOptimizer
from patch.plan.resolve import resolve_sharding, with_sharding
from toolkits.benchmarks._contenders import (
    Contender,
    OurTrainer,
    SameBatches,
    llama,
    run_config,
    time_round,
)
from toolkits.benchmarks._link import Link, limit_speed
from toolkits.benchmarks._measure import COMMUNICATION, COMPUTE, Overlaps, now, slowest, take_turns
from toolkits.benchmarks._report import Aim, Panel, Report, run_benchmark
from toolkits.benchmarks._runner import has_gpus, run_ranks
from toolkits.benchmarks._upstream import Overlap, UpstreamTrainer, prepare_cpu

# The vocabulary is small, because the embedding has the last gradient and the first weight, so no compute can
# overlap with its communication. It has 2 % of the parameters, as in a large LLaMA.
_ON_CPU = llama(
    384, num_layers=16, hidden_size=192, ffn_hidden_size=512, num_attention_heads=6, num_query_groups=2,
    kv_channels=32, vocab_size=512,
)  # fmt: skip
_ON_CUDA = llama(
    1024, num_layers=16, hidden_size=2048, ffn_hidden_size=5632, num_attention_heads=16, num_query_groups=4,
    kv_channels=128, vocab_size=8192,
)  # fmt: skip
_WAITING = llama(
    8, num_layers=32, hidden_size=96, ffn_hidden_size=256, num_attention_heads=3, num_query_groups=1,
    kv_channels=32, vocab_size=128,
)  # fmt: skip
"""As many layers as LLaMA-3.1 8B."""

ALL_TO_ALL = "upstream: both, all-to-all"
OURS = {f"ours: {stage.name.lower()}": stage for stage in ZeroStage}
UPSTREAM = {
    "upstream: no overlap": Overlap(),
    "upstream: gradients": Overlap(gradients=True),
    "upstream: gradients + weights": Overlap(gradients=True, weights=True),
    ALL_TO_ALL: Overlap(gradients=True, weights=True, all_to_all=True),
}
_LEFT_OUT = ("ours: none", "upstream: no overlap", "upstream: gradients")
"""Contenders that are not the best at any accumulation: one round of 16 micro-batches takes minutes."""
_BUCKETS = 20
_TIMEOUT_S = 1800


class Setting(NamedTuple):
    """Layers, and the number of ranks."""

    layers: str
    """"compute" or "wait"."""
    num_ranks: int
    wait_s: float = 0.0
    """Seconds of a micro-batch in layers that wait."""

    @property
    def title(self) -> str:
        """For tables."""
        return f"layers {self.layers}, DP={self.num_ranks}"


_FULL = {
    "compute": {"1": (7, 2), "4": (4, 1)},
    "wait": {"1": (7, 2), "4": (3, 1), "16": (3, 1)},
}
_QUICK = {
    "compute": {"1": (3, 2), "4": (2, 1)},
    "wait": {"1": (2, 2), "4": (1, 1), "16": (1, 1)},
}
"""Number of accumulated micro-batches -> number of rounds, timed steps per round."""
_SETTINGS = (Setting("compute", 2), Setting("wait", 2, 0.5), Setting("wait", 4, 0.5))


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark("overlap", __doc__, argv, _run, "fewer rounds: about half the time", _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mbit", type=float, default=0.0,
        help="speed of the cable in Mbit/s (default: communication takes as long as compute)",
    )  # fmt: skip
    parser.add_argument(
        "--layers", choices=["both", "compute", "wait"], default="both", help="which settings"
    )
    parser.add_argument(
        "--buckets", type=int, default=_BUCKETS,
        help="the bucket size is the model's divided by this (default: %(default)s)",
    )  # fmt: skip


def _run(arguments: argparse.Namespace) -> Report:
    aims: list[Aim] = []
    panels: list[Panel] = []
    reports: dict[str, Any] = {}
    cuda = has_gpus(2)
    settings = [one for one in _SETTINGS if arguments.layers in ("both", one.layers)]
    for setting in settings[:1] if cuda else settings:
        begin = time.monotonic()
        schedule = (_QUICK if arguments.quick else _FULL)[setting.layers]
        with nullcontext() if cuda else Link(setting.num_ranks) as link:
            measured = run_ranks(
                measure, setting.num_ranks, _TIMEOUT_S, link=link, wait_s=setting.wait_s,
                mbit=arguments.mbit, buckets=arguments.buckets, schedule=schedule,
            )  # fmt: skip
        way = "NCCL" if cuda else f"a cable of {measured['mbit']:.0f} Mbit/s each way"
        print(
            f"{setting.title}: {measured['bytes'] / 1e6:.1f} MB a rank and step over {way}; "
            f"{time.monotonic() - begin:.0f} s\n"
        )
        figures = {accumulation: _figures(rounds) for accumulation, rounds in measured["rounds"].items()}
        for accumulation, found in figures.items():
            title = f"{setting.title}, accumulation {accumulation}"
            panels.append(found.panel(title))
            print(found.table(title, found.best("upstream")), flush=True)
        aims += aims_of(setting, figures, cuda)
        reports[setting.title] = measured
    return Report("", aims, panels, {"settings": reports})


def _figures(rounds: dict[str, list[dict[str, float]]]) -> Overlaps:
    return Overlaps({name: [one["seconds"] for one in found] for name, found in rounds.items()})


def _auto_level(setting: Setting, cuda: bool) -> str:
    """The level that `--data-parallel-sharding auto` chooses for the benchmark's run."""
    config = with_sharding(sharded_run(setting.wait_s, cuda, setting.num_ranks, 4), "auto")
    return resolve_sharding(config, MachineFacts.probe())[0].zero_stage.name.lower()


def aims_of(setting: Setting, figures: dict[str, Overlaps], cuda: bool) -> list[Aim]:
    """What the issues ask of a setting."""
    auto = f"ours: {_auto_level(setting, cuda)}"
    first = figures["1"]
    ours, upstream = first.best("ours"), first.best("upstream")
    best, bound = "upstream's best", "max(compute, communication)"
    over_bound = first.over_bound(ours)
    if setting.layers == "wait":
        others = {accumulation: found for accumulation, found in figures.items() if accumulation != "1"}
        return [
            _aim(setting, "1", first, ours, 0.90),
            Aim(f"{setting.title}, accumulation 1: our best step / {bound}", over_bound, 1.05),
            *(_aim(setting, accumulation, found, auto, 0.97) for accumulation, found in others.items()),
        ]  # fmt: skip
    four = figures["4"]
    plain, plain_four = (found.best("upstream", besides=ALL_TO_ALL) for found in (first, four))
    return [
        Aim(f"accumulation 1: our best step / {best} of its plain settings", first.ratio(ours, plain), 0.90),
        Aim(f"accumulation 1: our best step / {best}", first.ratio(ours, upstream), 0.90),
        Aim(f"accumulation 1: our best step / {bound}", over_bound, 1.08),
        Aim(f"accumulation 4: auto ({auto}) / {best} of its plain settings",
            four.ratio(auto, plain_four), 1.0),
        Aim(f"accumulation 4: auto ({auto}) / {best}", four.ratio(auto, four.best("upstream")), 1.0),
    ]  # fmt: skip


def _aim(setting: Setting, accumulation: str, found: Overlaps, ours: str, aim: float) -> Aim:
    """Ours against upstream's best, and what perfect overlap would be."""
    best = found.best("upstream")
    name = f"{setting.title}, accumulation {accumulation}: {ours} / {best}"
    possible = f"(perfect overlap: {1 / found.over_bound(best):.3f})"
    return Aim(f"{name} {possible}", found.ratio(ours, best), aim)


def sharded_run(
    wait_s: float, cuda: bool, num_ranks: int, accumulation: int, buckets: int = _BUCKETS
) -> RunConfig:
    """The run that all contenders train: bf16 weights, fp32 gradients.

    Args:
        wait_s: seconds of a micro-batch in layers that wait; 0: layers compute.
        cuda: whether on GPUs.
        num_ranks: data-parallel ranks.
        accumulation: micro-batches of a step.
        buckets: of the model, if they were all of one size.
    """
    model = _WAITING if wait_s else _ON_CUDA if cuda else _ON_CPU
    return run_config(
        model, ParallelConfig(nproc_per_node=num_ranks),
        {"reduce_bucket_size": _num_parameters(model) // buckets},
        global_batch_size=num_ranks * accumulation, precision="bf16",
    )  # fmt: skip


def _num_parameters(model: ModelConfig) -> int:
    """Number of parameters in matrices."""
    attention = (2 * model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    layer = model.hidden_size * (attention + 3 * model.ffn_hidden_size)
    return model.num_layers * layer + 2 * model.vocab_size * model.hidden_size


class ComputeAlone(OurTrainer):
    """A job of one rank, without communication.

    It updates all parameters, while a rank of the other contenders updates only its shard; `take_surplus` is
    the time of the part that belongs to other ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
        reader: SameBatches,
        wait_s: float = 0.0,
    ) -> None:
        alone = copy.copy(groups)
        alone.dp = alone.dp_cp = dist.new_subgroups(1)[0]
        super().__init__(config, alone, device, reader, wait_s)
        self._num_shards = groups.dp_cp.size()
        self._update_s = 0.0
        update = self.run.optimizer._update

        def timed_update(grad_norm: float, lr: float) -> None:
            begin = now(device)
            update(grad_norm, lr)
            self._update_s += now(device) - begin

        self.run.optimizer._update = timed_update  # type: ignore[method-assign, assignment]

    def take_surplus(self) -> float:
        """Seconds of updates that belong to other ranks' shards, since the last call."""
        update_s, self._update_s = self._update_s, 0.0
        return update_s * (1 - 1 / self._num_shards)


class CommunicationAlone(Contender):
    """The bytes of one sharded step, bucket by bucket: gradients reduce-scattered, weights gathered."""

    def __init__(self, like: OverlappedDistributedOptimizer) -> None:
        self._group = like.groups.dp_cp
        self._rank, self._num_ranks = self._group.rank(), self._group.size()
        self._clock = WaitClock(like.device)
        numels = [bucket.range.numel for bucket in like.grad_buffer.buckets]
        total, device = sum(numels), like.device
        self._gradients = torch.zeros(total, dtype=torch.float32, device=device).split(numels)
        dtype = like.param_buffer.flats[0].dtype
        self._weights = torch.zeros(total, dtype=dtype, device=device).split(numels)
        self.num_buckets = len(numels)

    @property
    def num_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        whole = sum(part.numel() * part.element_size() for part in (*self._gradients, *self._weights))
        return whole * (self._num_ranks - 1) // self._num_ranks

    def step(self) -> float:
        """All reductions, then all gathers."""
        reduced = [start_reduce_scatter(part, self._own(part), self._group) for part in self._gradients]
        for pending in reduced:
            pending.wait(self._clock)
        gathered = [start_all_gather(part, self._own(part), self._group) for part in self._weights]
        for pending in gathered:
            pending.wait(self._clock)
        return 0.0

    def _own(self, part: torch.Tensor) -> torch.Tensor:
        return part.chunk(self._num_ranks)[self._rank]


def build_contenders(
    config: RunConfig,
    groups: ProcessGroupCollection,
    device: torch.device,
    wait_s: float = 0.0,
    without: Sequence[str] = (),
) -> dict[str, Contender]:
    """The contenders by name, on this rank; each has its own model with the same first weights.

    Args:
        config: the run that all contenders train.
        groups: the process groups of the job.
        device: the device of this rank.
        wait_s: seconds of a micro-batch in layers that wait; 0: layers compute.
        without: the names of those that are left out.
    """
    reader = SameBatches(config, groups.dp_cp.rank())
    contenders: dict[str, Contender] = {COMPUTE: ComputeAlone(config, groups, device, reader, wait_s)}
    for name, stage in OURS.items():
        if name in without:
            continue
        contenders[name] = OurTrainer(with_sharding(config, stage), groups, device, reader, wait_s)
    sharded = contenders["ours: optimizer"]
    assert isinstance(sharded, OurTrainer)
    contenders[COMMUNICATION] = CommunicationAlone(sharded.run.optimizer)
    for name, overlap in UPSTREAM.items():
        if name in without:
            continue
        contenders[name] = UpstreamTrainer(config, groups, device, reader.batches, overlap, wait_s)
    return contenders


def measure(
    context: DeviceContext, wait_s: float, mbit: float, buckets: int, schedule: dict[str, tuple[int, int]]
) -> dict[str, Any]:
    """Set the cable's speed, time all contenders; equal on all ranks.

    Args:
        context: the device of this rank.
        wait_s: see `sharded_run`.
        mbit: speed of the cable; 0: communication takes as long as compute. Not used with CUDA.
        buckets: see `sharded_run`.
        schedule: see _FULL.
    """
    device, num_ranks = context.device, dist.get_world_size()
    if not context.is_cuda:
        prepare_cpu()
    groups = initialize(sharded_run(wait_s, context.is_cuda, num_ranks, 1), context)
    result: dict[str, Any] = {"mbit": None, "rounds": {}}
    for accumulation, (rounds, steps) in schedule.items():
        config = sharded_run(wait_s, context.is_cuda, num_ranks, int(accumulation), buckets)
        without = _LEFT_OUT if wait_s and int(accumulation) > 1 else ()
        by_name = build_contenders(config, groups, device, wait_s, without)
        if result["mbit"] is None and not context.is_cuda:
            result["mbit"] = _set_speed(mbit, by_name, device)
        rounds_of = {name: partial(_round, one, steps, device) for name, one in by_name.items()}
        result["rounds"][accumulation] = take_turns(rounds_of, rounds)
        result["bytes"] = by_name[COMMUNICATION].num_bytes  # type: ignore[attr-defined]
        result["buckets"] = {name: one.num_buckets for name, one in by_name.items()}
    return result


def _round(contender: Contender, steps: int, device: torch.device) -> dict[str, float]:
    seconds, loss = time_round(contender, steps, device)
    return {"seconds": slowest(seconds, device), "loss": loss}


def _set_speed(mbit: float, by_name: dict[str, Contender], device: torch.device) -> float:
    """Limit the cable to `mbit`, or to the speed at which communication takes as long as compute."""
    if mbit:
        limit_speed(mbit)
        return mbit
    messages = by_name[COMMUNICATION]
    assert isinstance(messages, CommunicationAlone)
    compute = _undisturbed(by_name[COMPUTE], device)
    mbit = messages.num_bytes * 8e-6 / compute
    limit_speed(mbit)
    # Headers and waits make it slower, so the speed is corrected once by a measurement.
    mbit *= _undisturbed(messages, device) / compute
    limit_speed(mbit)
    return mbit


def _undisturbed(contender: Contender, device: torch.device) -> float:
    """Seconds of the fastest of a few steps, which other work on the machine disturbs least."""
    return min(_round(contender, 1, device)["seconds"] for _ in range(4))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
