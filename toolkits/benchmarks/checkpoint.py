"""Measure saving and loading of a checkpoint beside a plain copy of its bytes, and the stall of a save.

    python -m toolkits.benchmarks checkpoint [--quick] [--json FILE]

One process, a state of 1 GB. Each round copies a checkpoint's files, saves, saves in the background and
loads, in a new order. Copies and saves end with fsync. Sources are still in the page cache.
A load includes the checksums of all files. The stall of a background save is its start, plus the rest of the
host copies after a step of one second. During this step the process sleeps, as an accelerator's host does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from patch import compat
from patch.checkpoint import latest_iteration, load_checkpoint, save_checkpoint
from patch.checkpoint.host_copies import HostCopies
from patch.checkpoint.save import Save
from patch.distributed.groups import alone
from patch.storage.atomic import sync
from patch.storage.names import TRACKER, iteration_name
from toolkits.benchmarks._measure import CPU, take_turns, time_call
from toolkits.benchmarks._report import Aim, Report, Rounds

_STEP_S = 1.0
_COUNT, _ROWS, _COLUMNS = 18, 1024, 4096
"""Number and shape of the weights in bf16. Each has three states in fp32; together 59 MB."""
_BYTES_EACH = 14 * _ROWS * _COLUMNS
COPY, SAVE, STALL, WRITE, LOAD = "plain copy", "save", "stall of one in the background", "its write", "load"
ROUNDS = (9, 3)


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    compat.apply(cuda=False)
    with tempfile.TemporaryDirectory() as folder, alone(CPU):
        seconds = _measure(Path(folder), arguments.rounds)
    num_bytes = _COUNT * _BYTES_EACH
    aims = [
        Aim("save / plain copy", seconds.ratio(SAVE, COPY), 1 / 0.6),
        Aim("load with checksums / plain copy", seconds.ratio(LOAD, COPY), 1 / 0.6),
        Aim("stall of a save in the background / save", seconds.ratio(STALL, SAVE), 0.1),
    ]
    head = f"{num_bytes / 1e9:.2f} GB, {torch.get_num_threads()} threads, {arguments.rounds} rounds\n"
    speeds = {"GB/s": lambda way: f"{num_bytes / median(seconds.values[way]) / 1e9:.2f}"}
    text = f"{head}\n{seconds.table('', COPY, speeds)}"
    return Report(text, aims, {"bytes": num_bytes, "rounds": seconds.values})


def _state() -> dict[str, dict[str, ShardedTensor]]:
    tensors = {}
    for index in range(_COUNT):
        tensors[f"decoder.{index}"] = torch.randn(_ROWS, _COLUMNS).bfloat16()
        for name in ("master", "exp_avg", "exp_avg_sq"):
            tensors[f"optimizer.{name}.{index}"] = torch.randn(_ROWS, _COLUMNS)
    return {"model": {key: ShardedTensor.from_rank_offsets(key, value) for key, value in tensors.items()}}


def _measure(root: Path, rounds: int) -> Rounds:
    """Return the seconds of each way by round, without a first round."""
    state, copies = _state(), HostCopies()
    save_checkpoint(root, 0, state, {})

    def copy() -> None:
        (root / "copy").mkdir()
        for file in (root / iteration_name(0)).iterdir():
            sync(shutil.copyfile(file, root / "copy" / file.name))

    def load() -> None:
        assert latest_iteration(root) == 0
        load_checkpoint(root, 0, state)

    def save_in_background() -> tuple[float, float]:
        begin = time.perf_counter()
        pending = Save(root, 2, state, {}, copies)
        stall = time.perf_counter() - begin
        time.sleep(_STEP_S)
        stall += time_call(pending.wait_for_copies, CPU).wall
        pending.finish()
        return stall, pending.seconds

    def alone_on_disk(way: Callable[[], tuple[float, float]]) -> tuple[float, float]:
        os.sync()  # otherwise earlier writes would be part of the time
        found = way()
        _clear(root)
        return found

    save: Callable[[], object] = partial(save_checkpoint, root, 1, state, {})
    ways = {COPY: copy, SAVE: save, LOAD: load}
    calls: dict[str, Callable[[], tuple[float, float]]] = {
        **{name: partial(time_call, way, CPU) for name, way in ways.items()}, STALL: save_in_background,
    }  # fmt: skip
    found = take_turns({name: partial(alone_on_disk, call) for name, call in calls.items()}, rounds + 1)
    seconds = {name: [first for first, _ in times[1:]] for name, times in found.items()}
    return Rounds({**seconds, WRITE: [write for _, write in found[STALL][1:]]})


def _clear(root: Path) -> None:
    """Remove all but the first checkpoint, and let the tracker name it."""
    for name in ("copy", iteration_name(1), iteration_name(2)):
        shutil.rmtree(root / name, ignore_errors=True)
    (root / TRACKER).write_text("0\n")
