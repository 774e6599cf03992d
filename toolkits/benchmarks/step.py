"""Measures a training step on CPUs beside what users write without us: a plain loop of transformers, DDP.

python -m toolkits.benchmarks.step [--quick] [--json FILE] [--plot FILE] [--only fp32,1,1]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from patch.device import MachineFacts, usable_cores
from toolkits.benchmarks._link import run_ranks
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json
from toolkits.benchmarks._step_rank import OURS, PLAIN, Task, ratio

_ROUNDS, _QUICK_ROUNDS = 9, 3
_STEPS = 4
_AIM = 0.95
_LOSS_BOUND = {"fp32": 1e-4, "bf16": 2e-2}
_TIMEOUT_S = 900
_NUM_OPERATORS = 8


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 1 if the contenders do not learn the same."""
    arguments = _parse(argv)
    found: dict[str, Any] = {}
    for precision, num_ranks, accumulation in _cases(arguments.only):
        name = f"{precision}, {num_ranks} process{'es'[: 2 * (num_ranks > 1)]}, accumulation {accumulation}"
        rounds = _QUICK_ROUNDS if arguments.quick else _ROUNDS
        steps = max(1, _STEPS // accumulation)
        threads = max(1, min(2, usable_cores()) // num_ranks)
        task = Task(
            precision=precision, accumulation=accumulation, threads=threads, rounds=rounds, steps=steps
        )
        found[name] = run_ranks(task, num_ranks, None, _TIMEOUT_S)
        print(_text(name, found[name]))
        ours, plain = (found[name]["losses"][who] for who in (OURS, PLAIN))
        if abs(ours - plain) > _LOSS_BOUND[precision] * plain:
            print(f"FAILED: losses {ours} and {plain}, expected equal ones", file=sys.stderr)
            return 1
    aims = [Aim(f"{name}: {OURS} / {PLAIN}", ratio(one["rounds"]), _AIM) for name, one in found.items()]
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, measured=found)
    _plot(arguments.plot, found)
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("step", __doc__, "fewer rounds")
    parser.add_argument("--only", help="one case: precision,processes,accumulation, as fp32,2,4")
    return parser.parse_args(argv)


def _cases(only: str | None) -> list[tuple[str, int, int]]:
    if only:
        precision, num_ranks, accumulation = only.split(",")
        return [(precision, int(num_ranks), int(accumulation))]
    precisions = ("fp32", "bf16") if MachineFacts.probe().multiplies_16_bits else ("fp32",)
    return [(precision, ranks, n) for precision in precisions for ranks in (1, 2) for n in (1, 4)]


def _text(name: str, found: dict[str, Any]) -> str:
    """Milliseconds of a step of each contender, and of its dearest operators."""
    lines = [f"{name}: {ratio(found['rounds']):.3f}"]
    for contender, seconds in found["rounds"].items():
        least, middle, most = (1e3 * value for value in (min(seconds), median(seconds), max(seconds)))
        loss = found["losses"][contender]
        lines.append(f"  {contender:14}{middle:8.1f} ms ({least:.1f} to {most:.1f}), loss {loss:.5f}")
        for operator, calls, milliseconds, share in found["kernels"][contender][:_NUM_OPERATORS]:
            lines.append(f"    {milliseconds:8.1f} ms {share:6.1%} {calls:5} x {operator}")
    return "\n".join(lines)


def _plot(file: Any, found: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for place, one in enumerate(found.values()):
        pairs = zip(one["rounds"][OURS], one["rounds"][PLAIN], strict=True)
        axis.plot([a / b for a, b in pairs], [place] * len(one["rounds"][OURS]), "o", alpha=0.5)
    axis.set_yticks(range(len(found)), list(found))
    axis.axvline(1.0, color="grey")
    axis.set(xlabel=f"{OURS} / {PLAIN}, each round")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
