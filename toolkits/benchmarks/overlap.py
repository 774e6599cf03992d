"""Measures how well data-parallel communication overlaps with compute, ours and megatron-core's DDP.

    python -m toolkits.benchmarks.overlap [--quick] [--layers LAYERS] [--buckets N] [--mbit SPEED] [--json F]
        [--plot F]

Without two GPUs: ranks in network namespaces connected by cables of limited speed (needs root and iproute2);
two ranks on one core each whose layers compute, then two and four whose layers wait. With two GPUs: two NCCL
ranks. All contenders run alternately in the same processes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from patch.device import MachineFacts
from patch.plan.sharding import resolve_sharding, with_sharding
from toolkits.benchmarks._link import Link, LinkError, has_gpus, run_ranks
from toolkits.benchmarks._overlap_figures import Figures, plot, table
from toolkits.benchmarks._overlap_rank import Task, sharded_run
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json


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


# Number of accumulated micro-batches -> number of rounds, timed steps per round.
_FULL = {
    "compute": {"1": [7, 2], "4": [4, 1]},
    "wait": {"1": [7, 2], "4": [3, 1], "16": [3, 1]},
}
_QUICK = {
    "compute": {"1": [3, 2], "4": [2, 1]},
    "wait": {"1": [2, 2], "4": [1, 1], "16": [1, 1]},
}
_SETTINGS = (Setting("compute", 2), Setting("wait", 2, 0.5), Setting("wait", 4, 0.5))
_TIMEOUT_S = 1800


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also if it cannot run here, 130 after Ctrl-C."""
    arguments = _parse(argv)
    aims: list[Aim] = []
    titled: dict[str, Figures] = {}
    reports: dict[str, Any] = {}
    try:
        cuda = has_gpus(2)
        settings = [one for one in _SETTINGS if arguments.layers in ("both", one.layers)]
        for setting in settings[:1] if cuda else settings:
            begin = time.monotonic()
            measured = _run(setting, arguments, cuda)
            figures = {accumulation: Figures(rounds) for accumulation, rounds in measured["rounds"].items()}
            way = "NCCL" if cuda else f"a cable of {measured['mbit']:.0f} Mbit/s each way"
            print(f"{setting.title}: {measured['bytes'] / 1e6:.1f} MB a rank and step over {way}; "
                  f"{time.monotonic() - begin:.0f} s\n")  # fmt: skip
            for accumulation, found in figures.items():
                title = f"{setting.title}, accumulation {accumulation}"
                titled[title] = found
                print(table(title, found))
            aims += _aims(setting, figures, cuda)
            reports[setting.title] = measured
    except LinkError as reason:
        print(f"not run: {reason}")
        return 0
    except KeyboardInterrupt:
        return 130
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, settings=reports)
    plot(arguments.plot, titled)
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("overlap", __doc__, "fewer rounds: about half the time")
    parser.add_argument(
        "--mbit", type=float, default=0.0,
        help="speed of the cable in Mbit/s (default: communication takes as long as compute)",
    )  # fmt: skip
    parser.add_argument(
        "--layers", choices=["both", "compute", "wait"], default="both", help="which settings"
    )
    parser.add_argument(
        "--buckets", type=int, default=Task.buckets,
        help="the bucket size is the model's divided by this (default: %(default)s)",
    )  # fmt: skip
    return parser.parse_args(argv)


def _run(setting: Setting, arguments: argparse.Namespace, cuda: bool) -> dict[str, Any]:
    schedule = (_QUICK if arguments.quick else _FULL)[setting.layers]
    with nullcontext() if cuda else Link(setting.num_ranks) as link:
        task = Task(
            cuda=cuda, wait_s=setting.wait_s, mbit=arguments.mbit, buckets=arguments.buckets,
            schedule=schedule,
        )  # fmt: skip
        return run_ranks(task, setting.num_ranks, link, _TIMEOUT_S)


def _auto_level(setting: Setting, cuda: bool) -> str:
    """The level that `--data-parallel-sharding auto` chooses for the benchmark's run."""
    task = Task(cuda=cuda, wait_s=setting.wait_s, mbit=0.0, schedule={})
    config = with_sharding(sharded_run(task, setting.num_ranks, 4), "auto")
    return resolve_sharding(config, MachineFacts.probe())[0].zero_stage.name.lower()


def _aims(setting: Setting, figures: dict[str, Figures], cuda: bool) -> list[Aim]:
    """What the issues ask of a setting."""
    auto = f"ours: {_auto_level(setting, cuda)}"
    first = figures["1"]
    best, bound = "upstream's best", "max(compute, communication)"
    over_bound = first.over_bound(first.best_ours)
    if setting.layers == "wait":
        others = {accumulation: found for accumulation, found in figures.items() if accumulation != "1"}
        return [
            _aim(setting, "1", first, first.best_ours, 0.90),
            Aim(f"{setting.title}, accumulation 1: our best step / {bound}", over_bound, 1.05),
            *(_aim(setting, accumulation, found, auto, 0.97) for accumulation, found in others.items()),
        ]  # fmt: skip
    four = figures["4"]
    return [
        Aim(f"accumulation 1: our best step / {best} of its plain settings",
            first.ratio(first.best_ours, first.best_plain_upstream), 0.90),
        Aim(f"accumulation 1: our best step / {best}",
            first.ratio(first.best_ours, first.best_upstream), 0.90),
        Aim(f"accumulation 1: our best step / {bound}", over_bound, 1.08),
        Aim(f"accumulation 4: auto ({auto}) / {best} of its plain settings",
            four.ratio(auto, four.best_plain_upstream), 1.0),
        Aim(f"accumulation 4: auto ({auto}) / {best}", four.ratio(auto, four.best_upstream), 1.0),
    ]  # fmt: skip


def _aim(setting: Setting, accumulation: str, found: Figures, ours: str, aim: float) -> Aim:
    """Ours against upstream's best, and what perfect overlap would be."""
    best = found.best_upstream
    name = f"{setting.title}, accumulation {accumulation}: {ours} / {best}"
    possible = f"(perfect overlap: {found.best_possible(best):.3f})"
    return Aim(f"{name} {possible}", found.ratio(ours, best), aim)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
