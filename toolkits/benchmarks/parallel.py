"""Measures a pipeline's bubble, whether the ring's messages are hidden, and what offloaded activations cost.

    python -m toolkits.benchmarks.parallel [--part pipeline|context|activations] [--quick] [--json FILE]

The pipeline's layers wait instead of computing, so that any number of processes run on any number of cores.
The two context-parallel ranks are at the ends of a cable of limited speed (needs root and iproute2).
Activations are offloaded from a simulated device, over copies of limited speed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from patch.device import MachineFacts
from toolkits.benchmarks import _activation_step, _context_step, _pipeline_bubble
from toolkits.benchmarks._link import Link, LinkError, run_ranks
from toolkits.benchmarks._parallel_figures import (
    Bubble,
    ContextFigures,
    activation_table,
    bubble_table,
    context_table,
    plot,
)
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

PIPELINE, CONTEXT, ACTIVATIONS = PARTS = "pipeline", "context", "activations"
_MICRO_BATCHES = {2: (2, 4, 8), 4: (4, 8, 16)}
"""Stages p -> numbers m of micro-batches; v is 1 and 2."""
_QUICK_MICRO_BATCHES = {2: (4,)}
_WAITS_S = (0.1, 0.4)
_ROUNDS, _QUICK_ROUNDS = {PIPELINE: 5, CONTEXT: 7, ACTIVATIONS: 9}, {PIPELINE: 1, CONTEXT: 2, ACTIVATIONS: 1}
_SHARES, _QUICK_SHARES = [1.0, 0.4], [1.0]
_COPY_SHARES = [0.5, 1.0, 2.0]
_TIMEOUT_S = 900
_MOST_OFF, _MOST_OVER_BOUND = 0.05, 1.1


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also if a part cannot run here, 130 after Ctrl-C."""
    arguments = _parse(argv)
    aims: list[Aim] = []
    bubbles: list[Bubble] = []
    contexts: list[ContextFigures] = []
    activations: dict[str, list[dict[str, float]]] = {}
    try:
        if PIPELINE in arguments.part:
            bubbles = _measure_bubbles(arguments.quick)
            aims += _bubble_aims(bubbles)
            print(bubble_table(bubbles))
        if CONTEXT in arguments.part:
            contexts = _measure_contexts(arguments.quick)
            aims += _context_aims(contexts)
            print(context_table(contexts))
        if ACTIVATIONS in arguments.part:
            rounds = (_QUICK_ROUNDS if arguments.quick else _ROUNDS)[ACTIVATIONS]
            activations = _activation_step.measure(_COPY_SHARES, rounds)
            print(activation_table(activations))
    except KeyboardInterrupt:
        return 130
    if aims:
        print("\n".join(aim_lines(aims)))
    if arguments.json:
        raw = {"pipeline": [vars(one) for one in bubbles], "context": [vars(one) for one in contexts]}
        write_json(arguments.json, aims, **raw, activations=activations)
    if bubbles or contexts:
        plot(arguments.plot, bubbles, contexts)
        print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("parallel", __doc__, "fewer cases and rounds: about a minute")
    parser.add_argument(
        "--part", nargs="+", choices=PARTS, default=PARTS,
        help="what to measure (default: all)",
    )  # fmt: skip
    return parser.parse_args(argv)


def _measure_bubbles(quick: bool) -> list[Bubble]:
    rounds = (_QUICK_ROUNDS if quick else _ROUNDS)[PIPELINE]
    found = []
    for stages, numbers in (_QUICK_MICRO_BATCHES if quick else _MICRO_BATCHES).items():
        cases = [(v, m, wait_s) for v in (1, 2) for m in numbers for wait_s in _WAITS_S]
        measured = run_ranks(_pipeline_bubble.Task(cases=cases, rounds=rounds), stages, None, _TIMEOUT_S)
        by_case = dict(zip(cases, measured, strict=True))
        found += [
            Bubble(stages, v, m, {wait_s: by_case[v, m, wait_s] for wait_s in _WAITS_S})
            for v in (1, 2)
            for m in numbers
        ]
    return found


def _bubble_aims(bubbles: Sequence[Bubble]) -> list[Aim]:
    longest = max(_WAITS_S)
    return [
        Aim(
            "pipeline: farthest bubble from the formula, as a share of the formula, without constant costs",
            max(abs(one.without_constant / one.formula - 1) for one in bubbles), _MOST_OFF,
        ),
        Aim(
            f"pipeline: farthest step from the formula's, as a share of it, at {longest * 1e3:.0f} ms",
            max(abs((1 + one.at(longest)) / (1 + one.formula) - 1) for one in bubbles), _MOST_OFF,
        ),
    ]  # fmt: skip


def _context_aims(figures: Sequence[ContextFigures]) -> list[Aim]:
    name = "ring step / max(compute, messages), where messages alone take"
    ring = _context_step.RING
    return [
        Aim(f"{name} {one.share:g} of compute", one.over_bound(ring), _MOST_OVER_BOUND) for one in figures
    ]


def _measure_contexts(quick: bool) -> list[ContextFigures]:
    """Figures of each speed of the cable; empty, with a line that says why, if this machine cannot have
    one."""
    cores, needed = MachineFacts.probe().cpu_cores, _context_step.NUM_RANKS
    if cores < needed:
        print(f"context: not run: needs {needed} cores, found {cores}\n")
        return []
    rounds = (_QUICK_ROUNDS if quick else _ROUNDS)[CONTEXT]
    task = _context_step.Task(shares=_QUICK_SHARES if quick else _SHARES, rounds=rounds)
    try:
        with Link() as link:
            return [ContextFigures(**one) for one in run_ranks(task, needed, link, _TIMEOUT_S)]
    except LinkError as reason:
        print(f"context: not run: {reason}\n")
        return []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
