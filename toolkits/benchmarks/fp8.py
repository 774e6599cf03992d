"""Trains the quickstart in bf16 and with 8-bit products, over several seeds: losses and exact match.

    python -m toolkits.benchmarks.fp8 [--seeds N] [--quick] [--output DIR] [--json FILE] [--plot FILE]

Each training is the whole quickstart on one process: the launcher, export, and questions to the exported
model, five times as many as in the quickstart. A seed gives all contenders the same weights, and the same
data in the same order. The figures of a training are written when it ends; a training whose figures are in
the folder is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from patch.device import same_device
from toolkits.benchmarks._child import run_task
from toolkits.benchmarks._fp8_run import Fp8Task
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

BF16 = "bf16"
CONTENDERS: dict[str, tuple[str, ...]] = {
    BF16: (),
    "tensorwise, hybrid": (),
    "tensorwise, e4m3": ("--fp8-format", "e4m3"),
    "rowwise, e4m3": ("--fp8-recipe", "rowwise", "--fp8-format", "e4m3"),
    "rowwise, hybrid": ("--fp8-recipe", "rowwise"),
}
"""The launcher's flags beside the precision, which is fp8 for all but the first."""
_QUICK = tuple(CONTENDERS)[:2]
_LIMIT_S = 7200.0
_BLOCK = 100
"""Steps whose mean loss is a point of a curve: single steps differ by their data."""
_MOST_POINTS = 1.0


class Trained(NamedTuple):
    """The figures of a training."""

    losses: list[float]
    """Loss of each step."""
    percent: float
    """Exact match of the exported model."""
    cpu_seconds: float
    """Processor time of the launcher and its process."""


Found = Mapping[str, Sequence[Trained]]
"""The trainings of each contender, in the same order of seeds."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, report whenever all contenders of a seed are done; 1 if a training failed."""
    arguments = _parse(argv)
    names = _QUICK if arguments.quick else tuple(CONTENDERS)
    tasks = [(seed, name) for seed in range(1, arguments.seeds + 1) for name in names]
    done: dict[tuple[int, str], Trained] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=same_device()) as pool:
        running = {pool.submit(_trained, arguments.output, *task): task for task in tasks}
        for future in as_completed(running):
            trained = future.result()
            if trained is not None:
                done[running[future]] = trained
            found = _whole_seeds(done, names)
            if trained is not None and found[BF16] and running[future][0] in _seeds(done, names):
                _report(arguments, found)
    return 0 if len(done) == len(tasks) else 1


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("fp8", __doc__, f"only {' and '.join(_QUICK)}")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each contender")
    parser.add_argument("--output", type=Path, default=Path("fp8_output"), help="folder to work in")
    return parser.parse_args(argv)


def _trained(folder: Path, seed: int, name: str) -> Trained | None:
    """The figures of a training, from its file if there is one; None if the training failed."""
    own = folder / f"seed_{seed}" / name.replace(", ", "_")
    file = own.with_suffix(".json")
    if not file.exists():
        precision = "bf16" if name == BF16 else "fp8"
        task = Fp8Task(folder=str(own), seed=seed, precision=precision, flags=CONTENDERS[name])
        measured = run_task(task, _LIMIT_S, {**os.environ, "OMP_NUM_THREADS": "1"}).measured
        if measured is None:
            return None
        print(f"seed {seed}, {name}: {measured['percent']:.1f} %", flush=True)
        unfinished = own.with_suffix(".part")
        unfinished.write_text(json.dumps(measured), encoding="utf-8")
        unfinished.replace(file)
    return Trained(**json.loads(file.read_text(encoding="utf-8")))


def _seeds(done: Mapping[tuple[int, str], Trained], names: Sequence[str]) -> list[int]:
    """The seeds with which all contenders were trained."""
    return sorted(seed for seed, name in done if name == BF16 and all((seed, each) in done for each in names))


def _whole_seeds(done: Mapping[tuple[int, str], Trained], names: Sequence[str]) -> Found:
    return {name: [done[seed, name] for seed in _seeds(done, names)] for name in names}


def _report(arguments: argparse.Namespace, found: Found) -> None:
    aims = aims_of(found)
    print(table(found))
    print("\n".join(aim_lines(aims)), flush=True)
    if arguments.json:
        trainings = {name: [each._asdict() for each in runs] for name, runs in found.items()}
        write_json(arguments.json, aims, contenders=trainings)
    _plot(arguments.plot, found)


def means(curve: Sequence[float]) -> list[float]:
    """The mean losses of each _BLOCK steps."""
    return [mean(curve[begin : begin + _BLOCK]) for begin in range(0, len(curve), _BLOCK)]


def spread(values: Sequence[float], digits: int) -> str:
    """Mean and sample standard deviation as text; of one value only itself."""
    deviation = f" +- {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}"


def points_behind(found: Found, name: str) -> list[float]:
    """How many points fewer right answers than bf16 a contender gives, for each seed."""
    return [
        reference.percent - ours.percent for reference, ours in zip(found[BF16], found[name], strict=True)
    ]


def aims_of(found: Found) -> list[Aim]:
    """How many points each contender is behind bf16 in the mean over seeds."""
    num_seeds = len(found[BF16])
    return [
        Aim(
            f"{name}: exact match behind bf16, mean of {num_seeds} seeds, in points",
            mean(points_behind(found, name)),
            _MOST_POINTS,
        )
        for name in found
        if name != BF16
    ]


def table(found: Found) -> str:
    """A column for each contender; cells are mean and standard deviation over the seeds.

    Rows: mean losses of some blocks of steps, exact match, points behind bf16 of the same seed, CPU seconds.
    """
    curves = {name: [means(each.losses) for each in runs] for name, runs in found.items()}
    num_blocks = len(curves[BF16][0])
    blocks = sorted({0, 1, 4, num_blocks // 2, num_blocks - 1} & set(range(num_blocks)))
    rows = {"mean loss of steps": list(found)}
    for block in blocks:
        title = f"{block * _BLOCK + 1} to {(block + 1) * _BLOCK}"
        rows[title] = [spread([curve[block] for curve in each], 4) for each in curves.values()]
    rows["exact match, %"] = [spread([each.percent for each in runs], 1) for runs in found.values()]
    rows["of each seed"] = [" ".join(f"{each.percent:.1f}" for each in runs) for runs in found.values()]
    rows["points behind bf16"] = [spread(points_behind(found, name), 2) for name in found]
    rows["CPU seconds"] = [spread([each.cpu_seconds for each in runs], 0) for runs in found.values()]
    width = 2 + max(len(cell) for cells in rows.values() for cell in cells)
    return "\n".join(
        f"{title:<20}" + "".join(f"{cell:>{width}}" for cell in cells) for title, cells in rows.items()
    )


def _plot(file: Path, found: Found) -> None:
    """The curves of mean losses over all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for name, runs in found.items():
        curve = [mean(points) for points in zip(*(means(each.losses) for each in runs), strict=True)]
        steps = [(block + 1) * _BLOCK for block in range(len(curve))]
        label = f"{name}: {mean(each.percent for each in runs):.1f} %"
        axis.plot(steps, curve, label=label, linewidth=2 if name == BF16 else 1)
    axis.set(yscale="log", xlabel="steps", ylabel=f"mean loss of {_BLOCK} steps")
    axis.legend(title="exact match")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
