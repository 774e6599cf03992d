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
from functools import partial
from pathlib import Path
from statistics import median

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch import compat
from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import start_save
from patch.distributed.groups import alone
from patch.storage.names import iteration_name
from toolkits.benchmarks._measure import Columns, Rounds, take_turns
from toolkits.benchmarks._report import Aim, Report, run_benchmark
from toolkits.benchmarks._runner import CPU

_STEP_S = 1.0
_COUNT, _ROWS, _COLUMNS = 18, 1024, 4096
"""Weights in bf16, each with three states in fp32: 59 MB."""
_BYTES_EACH = 14 * _ROWS * _COLUMNS
COPY, SAVE, STALL, WRITE, LOAD = "plain copy", "save", "stall of one in the background", "its write", "load"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    folder = {"type": Path, "help": "folder for 4 GB of temporary files (default: TMPDIR)"}
    return run_benchmark(_run, argv, rounds=(9, 3), options={"--folder": folder})


def _run(arguments: argparse.Namespace) -> Report:
    compat.apply(cuda=False)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder, alone(CPU):
        seconds = _measure(Path(folder), arguments.rounds)
    num_bytes = _COUNT * _BYTES_EACH
    aims = [
        Aim("save / plain copy", seconds.ratio(SAVE, COPY), 1 / 0.6),
        Aim("load with checksums / plain copy", seconds.ratio(LOAD, COPY), 1 / 0.6),
        Aim("stall of a save in the background / save", seconds.ratio(STALL, SAVE), 0.1),
    ]
    columns: Columns = {"GB/s": lambda way: f"{num_bytes / median(seconds.values[way]) / 1e9:.2f}"}
    head = f"{num_bytes / 1e9:.2f} GB, {torch.get_num_threads()} threads, {arguments.rounds} rounds\n"
    text = f"{head}\n{seconds.table('', COPY, columns)}"
    return Report(text, aims, [seconds.panel()], {"bytes": num_bytes, "rounds": seconds.values})


def _state() -> dict[str, dict[str, ShardedTensor]]:
    """Weights in bf16 and their states: fp32 masters, exp_avg, exp_avg_sq."""
    tensors = {}
    for index in range(_COUNT):
        tensors[f"decoder.{index}"] = torch.randn(_ROWS, _COLUMNS).bfloat16()
        for name in ("master", "exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{name}.{index}"] = torch.randn(_ROWS, _COLUMNS)
    return {"model": {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}}


def _measure(root: Path, rounds: int) -> Rounds:
    """Seconds of each way by round; a first round does not count."""
    state, copies = _state(), HostCopies()
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

    def alone_on_disk(way: Callable[[], dict[str, float]]) -> dict[str, float]:
        os.sync()  # what others have written is not waited for inside
        found = way()
        _clear(root)
        return found

    ways = {"copy": copy, "save": save, "in background": save_in_background, "load": load}
    found = take_turns({name: partial(alone_on_disk, way) for name, way in ways.items()}, rounds + 1)
    return Rounds(
        {name: [one[name] for one in rounds_of[1:]] for rounds_of in found.values() for name in rounds_of[0]}
    )


def _clear(root: Path) -> None:
    """Leave the first checkpoint alone, which is the newest again."""
    for name in ("copy", iteration_name(1), iteration_name(2)):
        shutil.rmtree(root / name, ignore_errors=True)
    (root / "latest_checkpointed_iteration.txt").write_text("0\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
