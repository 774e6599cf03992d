"""Measures how well data-parallel communication overlaps with compute, ours and megatron-core's DDP.

    python -m toolkits.benchmarks.overlap [--quick] [--json FILE] [--plot FILE] [--mbit SPEED]

Without two GPUs: two ranks on one core each, in two network namespaces connected by a cable of limited speed
(needs root and iproute2). With two GPUs: two NCCL ranks. All contenders run alternately in the same two
processes.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from patch.device import MachineFacts
from patch.plan.sharding import resolve_sharding, with_sharding
from toolkits.benchmarks._link import Link, LinkError, run_ranks
from toolkits.benchmarks._overlap_figures import Figures, plot, table
from toolkits.benchmarks._overlap_rank import NUM_RANKS, Task, run_config
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

# Number of accumulated micro-batches -> number of rounds, timed steps per round.
_FULL = {"1": [7, 2], "4": [4, 1]}
_QUICK = {"1": [3, 2], "4": [2, 1]}
_TIMEOUT_S = 900


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also if it cannot run here, 130 after Ctrl-C."""
    arguments = _parse(argv)
    machine = MachineFacts.probe()
    cuda = machine.cuda_devices >= NUM_RANKS
    if not cuda and machine.cpu_cores < NUM_RANKS:
        print(
            f"not run: needs {NUM_RANKS} cores or GPUs, found {machine.cpu_cores} and {machine.cuda_devices}"
        )
        return 0
    begin = time.monotonic()
    schedule = _QUICK if arguments.quick else _FULL
    try:
        measured = _measure(schedule, arguments.mbit, cuda)
    except LinkError as reason:
        print(f"not run: {reason}")
        return 0
    except KeyboardInterrupt:
        return 130
    figures = {accumulation: Figures(rounds) for accumulation, rounds in measured["rounds"].items()}
    aims = _aims(figures, f"ours: {_auto_level(cuda, 4, machine)}")
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


def _measure(schedule: dict[str, list[int]], mbit: float, cuda: bool) -> dict[str, Any]:
    """Run both ranks and return the measurements of rank 0.

    Raises:
        LinkError: namespaces cannot be created. RuntimeError: a rank failed; its message is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder, nullcontext() if cuda else Link() as link:
        store, output = f"{folder}/store", f"{folder}/output.json"
        commands = []
        for rank in range(NUM_RANKS):
            task = Task(rank=rank, store=store, output=output, cuda=cuda, mbit=mbit, schedule=schedule)
            commands.append(["-m", "toolkits.benchmarks._overlap_rank", task.to_json()])
        run_ranks(commands, link, _TIMEOUT_S)
        return json.loads(Path(output).read_text(encoding="utf-8"))


def _auto_level(cuda: bool, accumulation: int, machine: MachineFacts) -> str:
    """The level that `--data-parallel-sharding auto` chooses for the benchmark's run."""
    config = with_sharding(run_config(cuda, accumulation), "auto")
    return resolve_sharding(config, machine)[0].zero_stage.name.lower()


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
