"""llama-patch prove: do the flags of a run compute what a single process computes?

    llama-patch prove -- dsw 8B 1 16 1e-5 ...        # 25 positions and flags, flags alone, or --config FILE
    llama-patch prove --machine h100 --nodes 4 -- --config config.yaml      # a run for other machines

Layout, precision, packing, recomputation, offload, sharding, experts, adapters and objective stay. The model,
the batch and each axis of the layout are shrunk as far as their code paths allow; all changes are printed.
Two steps and an evaluation, on at most 8 CPU processes or on this machine's GPUs, are compared with one
process: tokens, losses, every gradient, norms, weights and optimizer states, also for a second step that
resumes from the single process's checkpoint. Exit code 0: they agree; 6: they differ, and the first differing
tensor is named.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from patch.config import RunConfig, to_yaml, user_message
from patch.config.fields import check_choice, with_values
from patch.device import MachineFacts
from patch.errors import ConfigError, TrainingError
from patch.plan.planned_run import plan_run
from patch.storage.names import (
    CHECKPOINT_FOLDER,
    CONFIG_FILE,
    DATA_RECORD_FILE,
    REFERENCE_FILE,
    TRACKER,
    iteration_name,
)
from patch.text import counted
from patch.training import OBJECTIVES
from toolkits._arguments import ArgumentParser, at_dashes, exit_code_of, members, typed
from toolkits._program import own_environment, run_program
from toolkits.prove.shrink import STEPS, Shrunk, shrink

if TYPE_CHECKING:
    from toolkits.prove.compare import Comparison

PROCESSES = 8
"""Largest number of processes without GPUs."""
DIFFERS = 6
_LIMIT_S = 600.0
"""Time limit of a run, on a machine with other work."""
_LINES = 15
"""Lines of a failed run that are printed."""
_WORKER = Path(__file__).with_name("worker.py")


def main(argv: list[str]) -> int:
    """Run the command line; return 0, 6 if the runs differ, or the exit code of the error."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # removes its folder and runs
    own, run = at_dashes(argv)
    options = _parser().parse_args(own)
    return exit_code_of(lambda: _prove(options, run), user_message)


def _prove(options: argparse.Namespace, argv: list[str]) -> int:
    if not argv:
        raise ConfigError("no run is given, expected one after `--`, such as -- --config config.yaml")
    here = MachineFacts.probe()
    planned = plan_run(argv, options.machine, options.nodes, environ=os.environ, here=here)
    run = planned.resolved
    check_choice(run.training.objective, list(OBJECTIVES), "--objective")
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="prove-") as folder:
        cpu, is_for_gpus = replace(here, cuda_devices=0, compute_capability=(0, 0)), planned.machine.is_gpu
        small = shrink(run, cpu, PROCESSES, Path(folder), is_for_gpus=is_for_gpus)
        on_gpus = here.cuda_devices >= small.layout.world_size
        if on_gpus:
            small = shrink(run, here, here.cuda_devices, Path(folder), is_for_gpus=is_for_gpus)
        print("this run, and the one that is proved:", *(f"  {line}" for line in small.folded), sep="\n")
        found = prove(small, Path(folder), on_gpus=on_gpus)
    for title, comparison in found.items():
        print(f"{title}:")
        for kind, (distance, bound) in comparison.largest.items():
            said = f"{distance:.2g} (bound {bound:.2g})" if bound else "unequal" if distance else "equal"
            print(f"  {kind:<14} {said}")
        for difference in comparison.differences:
            print(f"  DIFFERS {difference}")
    is_proved = not any(comparison.differences for comparison in found.values())
    said = "PASS: matches" if is_proved else "FAIL: differs from"
    print(f"{said} the single-process run ({time.perf_counter() - begin:.0f} s)")
    return 0 if is_proved else DIFFERS


def prove(small: Shrunk, folder: Path, *, on_gpus: bool) -> dict[str, Comparison]:
    """Start the runs and compare them.

    Args:
        small: the shrunk run and its single-process twin.
        folder: folder for all files.
        on_gpus: whether each process has its own GPU.
    Raises:
        PatchError: a run failed.
    """
    from toolkits.prove.compare import compare
    from toolkits.prove.made import make_data

    make_data(folder / "made", small.one)
    for run in (small.one, small.layout):
        _train(run, folder, Path(run.checkpoint.output_path).name, on_gpus=on_gpus)
    steps = {"steps": compare(small.layout, small.one, range(1, STEPS + 1))}
    cache = small.one.data.cache_dir
    resumed = with_values(small.layout, output_path=str(folder / "resumed"), cache_dir=cache)
    _copy_first_step(folder / "one", folder / "resumed")
    _train(resumed, folder, "resumed", on_gpus=on_gpus)
    return {**steps, "resumed from one process": compare(resumed, small.one, [STEPS])}


def _train(run: RunConfig, folder: Path, name: str, *, on_gpus: bool) -> None:
    """Train a run through our launcher. A failure raises TrainingError with the run's last lines."""
    file = folder / f"{name}.yaml"
    file.write_text(to_yaml(run), encoding="utf-8")
    environment = own_environment(TMPDIR=str(folder))  # removed with what a killed launcher leaves
    if not on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    began = time.perf_counter()
    ended = run_program([sys.executable, str(_WORKER), "--config", str(file)], _LIMIT_S, environment)
    if ended.code != 0:
        lines = "\n  ".join((ended.output + ended.error).splitlines()[-_LINES:])
        raise TrainingError(f"the run {name}: {ended.reason}; its last lines:\n  {lines}")
    processes = counted(run.world_size, "process")
    print(f"{name}: {processes}, {time.perf_counter() - began:.0f} s", flush=True)


def _copy_first_step(source: Path, target: Path) -> None:
    first = Path(CHECKPOINT_FOLDER, iteration_name(1))
    shutil.copytree(source / first, target / first)
    (target / CHECKPOINT_FOLDER / TRACKER).write_text("1\n")
    for name in (CONFIG_FILE, DATA_RECORD_FILE, REFERENCE_FILE):
        if (source / name).exists():
            shutil.copy(source / name, target / name)


def _parser() -> argparse.ArgumentParser:
    usage = "%(prog)s [--machine NAME] [--nodes N] -- RUN"
    gone = {"--against": "prove compares with one process; the tests compare with megatron-core"}
    prog = typed("python -m toolkits.prove")
    parser = ArgumentParser(prog=prog, usage=usage, description=__doc__, gone=gone)
    parser.add_argument(
        "--machine", default="here", metavar="NAME",
        help="what the run is meant for, as `llama-patch plan` takes it: h100, here, a file [here]",
    )  # fmt: skip
    parser.add_argument("--nodes", type=members, metavar="N", help="how many [as the run says, else 1]")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
