"""Measures how well data-parallel communication overlaps with compute, ours and megatron-core's DDP.

    python -m toolkits.benchmarks.overlap [--quick] [--json FILE] [--plot FILE] [--mbit SPEED]

Without two GPUs: two ranks on one core each, in two network namespaces connected by a cable of limited speed
(needs root and iproute2). With two GPUs: two NCCL ranks. All contenders run alternately in the same two
processes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext

from patch.device import MachineFacts
from patch.plan.sharding import resolve_sharding, with_sharding
from toolkits.benchmarks._link import Link, LinkError, has_gpus, run_ranks
from toolkits.benchmarks._overlap_figures import Figures, plot, table
from toolkits.benchmarks._overlap_rank import NUM_RANKS, Task, sharded_run
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

# Number of accumulated micro-batches -> number of rounds, timed steps per round.
_FULL = {"1": [7, 2], "4": [4, 1]}
_QUICK = {"1": [3, 2], "4": [2, 1]}
_TIMEOUT_S = 900


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also if it cannot run here, 130 after Ctrl-C."""
    arguments = _parse(argv)
    begin = time.monotonic()
    schedule = _QUICK if arguments.quick else _FULL
    try:
        cuda = has_gpus(NUM_RANKS)
        with nullcontext() if cuda else Link() as link:
            task = Task(cuda=cuda, mbit=arguments.mbit, schedule=schedule)
            measured = run_ranks(task, NUM_RANKS, link, _TIMEOUT_S)
    except LinkError as reason:
        print(f"not run: {reason}")
        return 0
    except KeyboardInterrupt:
        return 130
    figures = {accumulation: Figures(rounds) for accumulation, rounds in measured["rounds"].items()}
    aims = _aims(figures, f"ours: {_auto_level(cuda, 4)}")
    way = "NCCL" if cuda else f"a cable of {measured['mbit']:.0f} Mbit/s each way"
    print(f"{measured['bytes'] / 1e6:.1f} MB a rank and step over {way}; {time.monotonic() - begin:.0f} s\n")
    for accumulation, found in figures.items():
        print(table(f"accumulation {accumulation}", found))
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, **measured)
    plot(arguments.plot, {f"accumulation {number}": found for number, found in figures.items()})
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("overlap", __doc__, "fewer rounds: about half the time")
    parser.add_argument(
        "--mbit", type=float, default=0.0,
        help="speed of the cable in Mbit/s (default: communication takes as long as compute)",
    )  # fmt: skip
    return parser.parse_args(argv)


def _auto_level(cuda: bool, accumulation: int) -> str:
    """The level that `--data-parallel-sharding auto` chooses for the benchmark's run."""
    config = with_sharding(sharded_run(cuda, accumulation), "auto")
    return resolve_sharding(config, MachineFacts.probe())[0].zero_stage.name.lower()


def _aims(figures: dict[str, Figures], auto: str) -> list[Aim]:
    """The aims against the three plain settings of upstream, and against all of its settings."""
    one, four = figures["1"], figures["4"]
    ours, beside = one.best_ours, "upstream's best, all-to-all included"
    return [
        Aim(
            "accumulation 1: our best step / upstream's best", one.ratio(ours, one.best_plain_upstream), 0.90
        ),
        Aim(f"accumulation 1: our best step / {beside}", one.ratio(ours, one.best_upstream), 0.90),
        Aim("accumulation 1: our best step / max(compute, communication)", one.over_bound(ours), 1.08),
        Aim(
            f"accumulation 4: auto ({auto}) / upstream's best",
            four.ratio(auto, four.best_plain_upstream),
            1.0,
        ),
        Aim(f"accumulation 4: auto ({auto}) / {beside}", four.ratio(auto, four.best_upstream), 1.0),
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
