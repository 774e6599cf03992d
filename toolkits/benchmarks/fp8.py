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
import resource
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from transformers.utils.logging import disable_progress_bar

from patch.device import DeviceContext, same_device
from toolkits.benchmarks._report import Aim, Panel, Report, publish, run_benchmark, table
from toolkits.benchmarks._runner import try_alone
from toolkits.quickstart.__main__ import answer, exact_match_percent, train
from toolkits.quickstart.workspace import prepare

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
_NUM_QUESTIONS = 1000


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
    """Run the benchmark; an exit with 1 if a training failed."""
    return run_benchmark("fp8", __doc__, argv, _run, f"only {' and '.join(_QUICK)}", _add_options)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each contender")
    parser.add_argument("--output", type=Path, default=Path("fp8_output"), help="folder to work in")


def _run(arguments: argparse.Namespace) -> Report:
    """The figures of all trainings; those so far are reported whenever all contenders of a seed are done."""
    names = _QUICK if arguments.quick else tuple(CONTENDERS)
    tasks = [(seed, name) for seed in range(1, arguments.seeds + 1) for name in names]
    done: dict[tuple[int, str], Trained] = {}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=same_device()) as pool:
        running = {pool.submit(_trained, arguments.output, *task): task for task in tasks}
        for future in as_completed(running):
            trained = future.result()
            if trained is not None:
                done[running[future]] = trained
                if running[future][0] in _seeds(done, names) and len(done) < len(tasks):
                    publish(_report(_whole_seeds(done, names)), arguments)
    if len(done) < len(tasks):
        sys.exit(f"{len(tasks) - len(done)} of {len(tasks)} trainings failed")
    return _report(_whole_seeds(done, names))


def _trained(folder: Path, seed: int, name: str) -> Trained | None:
    """The figures of a training, from its file if there is one; None if the training failed."""
    own = folder / f"seed_{seed}" / name.replace(", ", "_")
    file = own.with_suffix(".json")
    if not file.exists():
        precision = "bf16" if name == BF16 else "fp8"
        measured = try_alone(
            measure, _LIMIT_S, on_cpu=True, environment={**os.environ, "OMP_NUM_THREADS": "1"},
            folder=str(own), seed=seed, precision=precision, flags=CONTENDERS[name],
        )  # fmt: skip
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


def _report(found: Found) -> Report:
    curves = {}
    for name, runs in found.items():
        curve = [mean(points) for points in zip(*(means(each.losses) for each in runs), strict=True)]
        steps = [(block + 1) * _BLOCK for block in range(len(curve))]
        curves[f"{name}: {mean(each.percent for each in runs):.1f} %"] = (steps, curve)
    panel = Panel(
        "steps", curves=curves, ylabel=f"mean loss of {_BLOCK} steps", scales=("linear", "log"),
        title="exact match in %",
    )  # fmt: skip
    trainings = {name: [each._asdict() for each in runs] for name, runs in found.items()}
    return Report(figures_table(found), aims_of(found), [panel], {"contenders": trainings})


def means(curve: Sequence[float]) -> list[float]:
    """The mean losses of each _BLOCK steps."""
    return [mean(curve[begin : begin + _BLOCK]) for begin in range(0, len(curve), _BLOCK)]


def mean_and_deviation(values: Sequence[float], digits: int) -> str:
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


def figures_table(found: Found) -> str:
    """A column for each contender; cells are mean and standard deviation over the seeds.

    Rows: mean losses of some blocks of steps, exact match, points behind bf16 of the same seed, CPU seconds.
    """
    curves = {name: [means(each.losses) for each in runs] for name, runs in found.items()}
    num_blocks = len(curves[BF16][0])
    blocks = sorted({0, 1, 4, num_blocks // 2, num_blocks - 1} & set(range(num_blocks)))
    rows = {}
    for block in blocks:
        title = f"{block * _BLOCK + 1} to {(block + 1) * _BLOCK}"
        rows[title] = [mean_and_deviation([curve[block] for curve in each], 4) for each in curves.values()]
    runs = list(found.values())
    rows["exact match, %"] = [mean_and_deviation([each.percent for each in one], 1) for one in runs]
    rows["of each seed"] = [" ".join(f"{each.percent:.1f}" for each in one) for one in runs]
    rows["points behind bf16"] = [mean_and_deviation(points_behind(found, name), 2) for name in found]
    rows["CPU seconds"] = [mean_and_deviation([each.cpu_seconds for each in one], 0) for one in runs]
    return table(["mean loss of steps", *found], [[title, *cells] for title, cells in rows.items()])


def measure(
    context: DeviceContext, folder: str, seed: int, precision: str, flags: Sequence[str]
) -> dict[str, Any]:
    """Train, export, and question the exported model: a whole quickstart on one process.

    Args:
        context: unused: the launcher starts a process of its own.
        folder: to work in; files of an earlier quickstart in it are removed.
        seed: of data, weights and the data's order.
        precision: of the training.
        flags: of the launcher, beside the precision.
    Returns:
        `losses` of each step, `percent` of the answers that are right, `cpu_seconds` of the launcher.
    """
    disable_progress_bar()
    space, held_out = prepare(Path(folder).resolve(), _NUM_QUESTIONS, seed)
    code = train(space, precision, (*flags, "--seed", str(seed)), num_processes=1)
    if code != 0:
        raise SystemExit(f"{folder}: the training ended with exit code {code}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "losses": list(space.losses().values()),
        "percent": exact_match_percent(answer(space.run / "hf", held_out)),
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
