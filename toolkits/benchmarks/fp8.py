"""Trains the quickstart in bf16 and with 8-bit products: loss curves and exact match beside each other.

    python -m toolkits.benchmarks.fp8 [--quick] [--output DIR] [--json FILE] [--plot FILE]

Each contender is the whole quickstart: the launcher with two CPU processes, the same data in the same order,
export, and questions to the exported model. There are five times as many questions as in the quickstart.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from transformers.utils.logging import disable_progress_bar

from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json
from toolkits.quickstart.__main__ import losses, train
from toolkits.quickstart.exam import answer, exact_match_percent
from toolkits.quickstart.workspace import prepare

BF16 = "bf16"
CONTENDERS: dict[str, tuple[str, ...]] = {
    BF16: (),
    "tensorwise, hybrid": (),
    "rowwise, hybrid": ("--fp8-recipe", "rowwise"),
    "tensorwise, e4m3": ("--fp8-format", "e4m3"),
    "rowwise, e4m3": ("--fp8-recipe", "rowwise", "--fp8-format", "e4m3"),
}
"""The launcher's flags beside the precision, which is fp8 for all but the first."""
_QUICK = tuple(CONTENDERS)[:2]
_NUM_QUESTIONS = 1000
_BLOCK = 100
"""Steps whose mean loss is a point of a curve: single steps differ by their data."""
_MOST_POINTS = 1.0


class Trained(NamedTuple):
    """A contender's whole quickstart."""

    losses: list[float]
    """Of each step."""
    percent: float
    """Exact match of the exported model."""
    cpu_seconds: float
    """Of the launcher and its processes."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; the launcher's exit code where a training fails."""
    arguments = _parse(argv)
    disable_progress_bar()
    found: dict[str, Trained] = {}
    for name in _QUICK if arguments.quick else CONTENDERS:
        trained = _quickstart(arguments.output / name.replace(", ", "_"), name)
        if isinstance(trained, int):
            return trained
        found[name] = trained
    aims = aims_of(found)
    print(table(found))
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, contenders={name: each._asdict() for name, each in found.items()})
    _plot(arguments.plot, found)
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("fp8", __doc__, f"only {' and '.join(_QUICK)}")
    parser.add_argument("--output", type=Path, default=Path("fp8_output"), help="folder to work in")
    return parser.parse_args(argv)


def _quickstart(folder: Path, name: str) -> Trained | int:
    """Train, export and question a contender; the launcher's exit code if it is not 0."""
    space, held_out = prepare(folder.resolve(), _NUM_QUESTIONS)
    before = _seconds_of_children()
    code = train(space, "bf16" if name == BF16 else "fp8", CONTENDERS[name])
    if code != 0:
        return code
    spent = _seconds_of_children() - before
    return Trained(losses(space), exact_match_percent(answer(space.run / "hf", held_out)), spent)


def _seconds_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def means(curve: Sequence[float]) -> list[float]:
    """The mean losses of each _BLOCK steps."""
    return [mean(curve[begin : begin + _BLOCK]) for begin in range(0, len(curve), _BLOCK)]


def behind(curve: Sequence[float], reference: Sequence[float]) -> float:
    """By how much a curve's mean losses are above those of the reference, where they are most so."""
    return max(ours - theirs for ours, theirs in zip(means(curve), means(reference), strict=True))


def aims_of(found: Mapping[str, Trained]) -> list[Aim]:
    """How many points each contender answers less than bf16."""
    return [
        Aim(f"{name}: exact match behind bf16, in points", found[BF16].percent - each.percent, _MOST_POINTS)
        for name, each in found.items()
        if name != BF16
    ]


def table(found: Mapping[str, Trained]) -> str:
    """A column for each contender: mean losses of some blocks, what lies above bf16's, and exact match."""
    curves = {name: means(each.losses) for name, each in found.items()}
    num_blocks = len(curves[BF16])
    blocks = sorted({0, 1, 4, num_blocks // 2, num_blocks - 1} & set(range(num_blocks)))
    rows = {"mean loss of steps": list(found)}
    for block in blocks:
        title = f"{block * _BLOCK + 1} to {(block + 1) * _BLOCK}"
        rows[title] = [f"{curve[block]:.4f}" for curve in curves.values()]
    reference = found[BF16].losses
    rows["most above bf16"] = [f"{behind(each.losses, reference):.4f}" for each in found.values()]
    rows["exact match, %"] = [f"{each.percent:.1f}" for each in found.values()]
    rows["CPU seconds"] = [f"{each.cpu_seconds:.0f}" for each in found.values()]
    return "\n".join(
        f"{title:<20}" + "".join(f"{cell:>20}" for cell in cells) for title, cells in rows.items()
    )


def _plot(file: Path, found: Mapping[str, Trained]) -> None:
    """The curves of mean losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, each in found.items():
        curve = means(each.losses)
        steps = [(block + 1) * _BLOCK for block in range(len(curve))]
        axis.plot(steps, curve, label=f"{name}: {each.percent:.1f} %", linewidth=2 if name == BF16 else 1)
    axis.set(yscale="log", xlabel="steps", ylabel=f"mean loss of {_BLOCK} steps")
    axis.legend(title="exact match")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
