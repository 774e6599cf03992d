"""Measures saving and loading of a checkpoint beside a plain copy of as many bytes, and the stall of a save.

    python -m toolkits.benchmarks.checkpoint [--quick] [--json FILE] [--plot FILE] [--folder FOLDER]

One process, a state of 1 GB. Each round copies a checkpoint's files, saves, saves in the background and
loads, in a new order. Copies and saves end with fsync; sources are in memory, since they were just written.
A load includes the comparison of all files with their checksums. The stall of a save in the background is
what its start takes, and what is left of copying the state after a forward and backward of one second (an
accelerator's: the process sleeps meanwhile).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch import compat
from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import start_save
from patch.device import DeviceContext
from patch.distributed.groups import alone
from patch.storage.names import iteration_name
from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

_ROUNDS, _QUICK_ROUNDS = 9, 3
_STEP_S = 1.0
_COUNT, _ROWS, _COLUMNS = 18, 1024, 4096
"""Weights in bf16, each with three states in fp32: 59 MB."""
_BYTES_EACH = 14 * _ROWS * _COLUMNS
COPY, SAVE, STALL, WRITE, LOAD = "plain copy", "save", "stall of one in the background", "its write", "load"
_WAYS = (COPY, SAVE, STALL, WRITE, LOAD)
Seconds = dict[str, list[float]]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    arguments = _parse(argv)
    rounds = _QUICK_ROUNDS if arguments.quick else _ROUNDS
    compat.apply(cuda=False)
    with (
        tempfile.TemporaryDirectory(dir=arguments.folder) as folder,
        alone(DeviceContext(torch.device("cpu"), "gloo")),
    ):
        seconds = _measure(Path(folder), rounds)
    aims = _aims(seconds)
    num_bytes = _COUNT * _BYTES_EACH
    print(f"{num_bytes / 1e9:.2f} GB, {torch.get_num_threads()} threads, {rounds} rounds\n")
    print(_table(seconds, num_bytes))
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, bytes=num_bytes, rounds=seconds)
    _plot(arguments.plot, seconds, num_bytes)
    print(f"plot: {arguments.plot}")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argument_parser("checkpoint", __doc__, "a third of the rounds")
    parser.add_argument("--folder", type=Path, help="folder for 4 GB of temporary files (default: TMPDIR)")
    return parser.parse_args(argv)


def _state() -> dict[str, dict[str, ShardedTensor]]:
    """Weights in bf16 and their states: fp32 masters, exp_avg, exp_avg_sq."""
    tensors = {}
    for index in range(_COUNT):
        tensors[f"decoder.{index}"] = torch.randn(_ROWS, _COLUMNS).bfloat16()
        for name in ("master", "exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{name}.{index}"] = torch.randn(_ROWS, _COLUMNS)
    return {"model": {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}}


def _measure(root: Path, rounds: int) -> Seconds:
    """Seconds of each way by round; a first round does not count."""
    state, copies = _state(), HostCopies()
    seconds: Seconds = {way: [] for way in _WAYS}
    save_checkpoint(root, 0, state, {})

    def copy() -> dict[str, float]:
        begin = time.perf_counter()
        (root / "copy").mkdir()
        for file in (root / iteration_name(0)).iterdir():
            shutil.copyfile(file, root / "copy" / file.name)
            with (root / "copy" / file.name).open("rb") as written:
                os.fsync(written.fileno())
        return {COPY: time.perf_counter() - begin}

    def save() -> dict[str, float]:
        begin = time.perf_counter()
        save_checkpoint(root, 1, state, {})
        return {SAVE: time.perf_counter() - begin}

    def save_in_background() -> dict[str, float]:
        begin = time.perf_counter()
        pending = start_save(root, 2, state, {}, copies)
        stall = time.perf_counter() - begin
        time.sleep(_STEP_S)
        begin = time.perf_counter()
        pending.wait_for_copies()
        stall += time.perf_counter() - begin
        pending.finish()
        return {STALL: stall, WRITE: pending.seconds}

    def load() -> dict[str, float]:
        begin = time.perf_counter()
        found = latest_iteration(root)
        assert found == 0
        load_checkpoint(root, found, state)
        return {LOAD: time.perf_counter() - begin}

    ways: list[Callable[[], dict[str, float]]] = [copy, save, save_in_background, load]
    for index in range(rounds + 1):
        Random(index).shuffle(ways)
        for way in ways:
            os.sync()  # what others have written is not waited for inside
            for name, value in way().items():
                if index:
                    seconds[name].append(value)
            _clear(root)
    return seconds


def _clear(root: Path) -> None:
    """Leave the first checkpoint alone, which is the newest again."""
    for name in ("copy", iteration_name(1), iteration_name(2)):
        shutil.rmtree(root / name, ignore_errors=True)
    (root / "latest_checkpointed_iteration.txt").write_text("0\n")


def _ratio(seconds: Seconds, way: str, other: str) -> float:
    """Median over rounds of the ratio within a round: other work on the machine hits neighbours alike."""
    return median(this / that for this, that in zip(seconds[way], seconds[other], strict=True))


def _aims(seconds: Seconds) -> list[Aim]:
    """The thresholds of the issue, as ratios of times."""
    return [
        Aim("save / plain copy", _ratio(seconds, SAVE, COPY), 1 / 0.6),
        Aim("load with checksums / plain copy", _ratio(seconds, LOAD, COPY), 1 / 0.6),
        Aim("stall of a save in the background / save", _ratio(seconds, STALL, SAVE), 0.1),
    ]


def _table(seconds: Seconds, num_bytes: int) -> str:
    lines = [f"{'':<32}{'median s':>9}{'quartiles':>16}{'GB/s':>8}{'/ copy':>8}"]
    for way in _WAYS:
        lower, middle, upper = quantiles(seconds[way], n=4, method="inclusive")
        quartiles = f"{lower:.3f} - {upper:.3f}"
        lines.append(
            f"{way:<32}{middle:>9.3f}{quartiles:>16}{num_bytes / middle / 1e9:>8.2f}"
            f"{_ratio(seconds, way, COPY):>8.2f}"
        )
    return "\n".join(lines) + "\n"


def _plot(file: Path, seconds: Seconds, num_bytes: int) -> None:
    """Bars of the times with quartiles."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(8, 3), layout="constrained")
    for way in reversed(_WAYS):
        lower, middle, upper = quantiles(seconds[way], n=4, method="inclusive")
        color = "tab:gray" if way == COPY else "tab:blue"
        axis.barh(way, middle, xerr=[[middle - lower], [upper - middle]], color=color)
    axis.set(xlabel=f"s for {num_bytes / 1e9:.2f} GB (median, quartiles)")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
