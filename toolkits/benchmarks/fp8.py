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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

from transformers.utils.logging import disable_progress_bar

from patch.device import DeviceContext, same_device
from patch.storage.atomic import write_atomically
from toolkits.benchmarks._report import Aim, Panel, Report, print_and_write, run_benchmark, table
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

    @property
    def curve(self) -> list[float]:
        """The mean losses of each _BLOCK steps."""
        return [mean(self.losses[begin : begin + _BLOCK]) for begin in range(0, len(self.losses), _BLOCK)]


Found = Mapping[str, Sequence[Trained]]
"""The trainings of each contender, in the same order of seeds."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; an exit with 1 if a training failed."""
    options: dict[str, dict[str, Any]] = {
        "--seeds": {"type": int, "default": 3, "help": "trainings of each contender"},
        "--output": {"type": Path, "default": Path("fp8_output"), "help": "folder to work in"},
    }
    return run_benchmark(_run, argv, quick=f"only {' and '.join(_QUICK)}", options=options)


def _run(arguments: argparse.Namespace) -> Report:
    """The figures of all trainings; those so far are reported whenever all contenders of a seed are done."""
    found: dict[str, list[Trained]] = {name: [] for name in (_QUICK if arguments.quick else CONTENDERS)}
    with ThreadPoolExecutor(len(os.sched_getaffinity(0)), initializer=same_device()) as pool:
        for seed in range(1, arguments.seeds + 1):
            if seed > 1:
                print_and_write(_report(found), arguments)
            trained = [*pool.map(partial(_trained, arguments.output, seed), found)]
            for name, each in zip(found, trained, strict=True):
                if each is None:
                    sys.exit(f"seed {seed}, {name}: the training failed")
                found[name].append(each)
    return _report(found)


def _trained(folder: Path, seed: int, name: str) -> Trained | None:
    """The figures of a training, from its file if there is one; None if the training failed."""
    own = folder / f"seed_{seed}" / name.replace(", ", "_")
    file = own.with_suffix(".json")
    if not file.exists():
        measured = try_alone(
            measure, _LIMIT_S, environment={**os.environ, "OMP_NUM_THREADS": "1"},
            folder=str(own), seed=seed, precision="bf16" if name == BF16 else "fp8", flags=CONTENDERS[name],
        )  # fmt: skip
        if measured is None:
            return None
        print(f"seed {seed}, {name}: {measured['percent']:.1f} %", flush=True)
        write_atomically(file, json.dumps(measured))
    return Trained(**json.loads(file.read_text(encoding="utf-8")))


def _report(found: Found) -> Report:
    curves = {}
    for name, runs in found.items():
        curve = [mean(points) for points in zip(*(each.curve for each in runs), strict=True)]
        steps = [(block + 1) * _BLOCK for block in range(len(curve))]
        curves[f"{name}: {mean(each.percent for each in runs):.1f} %"] = (steps, curve)
    panel = Panel(
        "steps", curves=curves, ylabel=f"mean loss of {_BLOCK} steps", scales=("linear", "log"),
        title="exact match in %",
    )  # fmt: skip
    trainings = {name: [each._asdict() for each in runs] for name, runs in found.items()}
    return Report(figures_table(found), aims_of(found), [panel], {"contenders": trainings})


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
    what = f"exact match behind bf16, mean of {len(found[BF16])} seeds, in points"
    return [
        Aim(f"{name}: {what}", mean(points_behind(found, name)), _MOST_POINTS)
        for name in found
        if name != BF16
    ]


def figures_table(found: Found) -> str:
    """A column for each contender; cells are mean and standard deviation over the seeds.

    Rows: mean losses of some blocks of steps, exact match, points behind bf16 of the same seed, CPU seconds.
    """
    num_blocks = len(found[BF16][0].curve)

    def row(title: str, value: Callable[[Trained], float], digits: int) -> list[str]:
        return [title, *(mean_and_deviation([*map(value, runs)], digits) for runs in found.values())]

    rows = []
    for block in sorted({0, 1, 4, num_blocks // 2, num_blocks - 1} & set(range(num_blocks))):
        curves = [[each.curve[block] for each in runs] for runs in found.values()]
        title = f"{block * _BLOCK + 1} to {(block + 1) * _BLOCK}"
        rows.append([title, *(mean_and_deviation(values, 4) for values in curves)])
    rows += [
        row("exact match, %", lambda each: each.percent, 1),
        ["of each seed", *(" ".join(f"{each.percent:.1f}" for each in runs) for runs in found.values())],
        ["points behind bf16", *(mean_and_deviation(points_behind(found, name), 2) for name in found)],
        row("CPU seconds", lambda each: each.cpu_seconds, 0),
    ]
    return table(["mean loss of steps", *found], rows)


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
        the fields of `Trained`.
    """
    disable_progress_bar()
    space, held_out = prepare(Path(folder).resolve(), _NUM_QUESTIONS, seed)
    code = train(space, precision, (*flags, "--seed", str(seed)), num_processes=1)
    if code != 0:
        raise SystemExit(f"{folder}: the training ended with exit code {code}")
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    percent = exact_match_percent(answer(space.run / "hf", held_out))
    return Trained(list(space.losses().values()), percent, usage.ru_utime + usage.ru_stime)._asdict()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
