"""Measures how well tensor-parallel messages overlap with the matrix products of the same layer.

    python -m toolkits.benchmarks.tensor_parallel [--compute] [--precision bf16|fp32] [--quick] [--json FILE]

Without two GPUs: two ranks on one core each, in two network namespaces connected by a cable of limited speed
(needs root and iproute2). With two GPUs: two NCCL ranks. All contenders run alternately in the same two
processes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from toolkits.benchmarks._link import Link, LinkError, has_gpus, run_ranks
from toolkits.benchmarks._overlap_figures import Figures, plot, table
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json
from toolkits.benchmarks._tensor_parallel_rank import NUM_RANKS, OVERLAPPED, UPSTREAM, Task

_ROUNDS, _QUICK_ROUNDS = 9, 3
_CABLES = {"as long as compute": 1.0, "half as long": 0.5}
"""Name -> the time of communication alone, as a share of the time of compute alone."""
_MOST = 0.95
"""The largest share of upstream's time: what is on by default should be worth it."""
_TIMEOUT_S = 600


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also if it cannot run here, 130 after Ctrl-C."""
    arguments = _parse(argv)
    try:
        cuda = has_gpus(NUM_RANKS)
        measured = _measure(arguments, cuda)
    except LinkError as reason:
        print(f"not run: {reason}")
        return 0
    except KeyboardInterrupt:
        return 130
    figures = {name: Figures(found["rounds"]) for name, found in measured.items()}
    for name, found in figures.items():
        way = "NCCL" if cuda else f"a cable of {measured[name]['mbit']:.0f} Mbit/s each way"
        print(f"{name}: {way}\n{table('', found)}")
    aims = [
        Aim(f"{name}: {OVERLAPPED} / {UPSTREAM}", found.ratio(OVERLAPPED, UPSTREAM), _MOST)
        for name, found in figures.items()
    ]
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, **measured)
    plot(arguments.plot, figures)
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("tensor_parallel", __doc__, f"{_QUICK_ROUNDS} rounds instead of {_ROUNDS}")
    parser.add_argument("--compute", action="store_true", help="without GPUs: compute products, do not wait")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of the layers")
    return parser.parse_args(argv)


def _measure(arguments: argparse.Namespace, cuda: bool) -> dict[str, Any]:
    """Run both ranks and return the measurements of rank 0.

    Raises:
        LinkError: namespaces cannot be created. RuntimeError: a rank failed; its message is on stderr.
    """
    task = Task(
        cuda=cuda, waits=not (cuda or arguments.compute), precision=arguments.precision,
        cables={"NCCL": 0.0} if cuda else _CABLES, rounds=_QUICK_ROUNDS if arguments.quick else _ROUNDS,
    )  # fmt: skip
    with nullcontext() if cuda else Link() as link:
        return run_ranks(task, NUM_RANKS, link, _TIMEOUT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
