"""A small sharded run through the launcher: trained, saved, resumed; the losses must be equal to the bit."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from patch.storage.names import CHECKPOINT_FOLDER, TRACKER, iteration_name
from toolkits.doctor.check import Ended, Finding, Settings, run_program
from toolkits.doctor.software import REPOSITORY
from toolkits.quickstart.workspace import Workspace, prepare

_LAUNCHER = REPOSITORY / "toolkits" / "train" / "__main__.py"
"""Beside this package also where it is installed."""
_STEPS, _SAVED = 4, 2
_RUN_S = 240.0
_SETTINGS = ("TOKENIZER_PATH", "OPTIMIZER_OFFLOAD_FRACTION")
"""Variables of a user's runs, besides MP_*, that are not for this one."""


def run_self_test(settings: Settings) -> Iterator[Finding]:
    """Train 4 steps with a checkpoint after 2, then resume from it and compare steps 3 and 4."""
    begin = time.perf_counter()
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        space, _ = prepare(Path(folder), num_held_out=4, num_train=16)
        processes = min(2, settings.num_processes)
        where = f"{processes} {'GPUs' if settings.has_gpus else 'processes on the CPU'}"
        trained = _train(space, processes, settings)
        if trained.code != 0:
            cure = "the JSON report has the run's last lines; attach it to an issue"
            what = f"{where}: {trained.reason[:300]}"
            yield Finding("training", "broken", what, cure, _tail(trained, space))
            return
        first = space.losses()
        what = f"{where}: {_STEPS} sharded steps and a checkpoint in {time.perf_counter() - begin:.0f} s"
        yield Finding("training", "ok", what, data={"losses": first})
        _forget_last_checkpoint(space.run / CHECKPOINT_FOLDER)
        resumed = _train(space, processes, settings)
        if resumed.code != 0:
            cure = "look at the file system of TMPDIR, then attach the JSON report to an issue"
            yield Finding("resuming", "broken", resumed.reason[:300], cure, _tail(resumed, space))
            return
        yield resumed_finding(first, space.losses())


def resumed_finding(first: dict[int, float], second: dict[int, float]) -> Finding:
    """Whether the steps after a resume are those of the run without one.

    Args:
        first: the loss of each step of the run without a stop.
        second: the same, after the last steps were trained again.
    """
    wrong = [step for step in range(1, _STEPS + 1) if first.get(step) != second.get(step)]
    data = {"without_stop": first, "resumed": second}
    if not wrong:
        return Finding("resuming", "ok", "from the checkpoint of step 2; losses equal to the bit", data=data)
    cure = "not a matter of speed: attach the JSON report to an issue"
    return Finding("resuming", "broken", f"losses of steps {wrong} differ", cure, data)


def _forget_last_checkpoint(root: Path) -> None:
    """Make a run that has ended one that was stopped after the step of its first checkpoint."""
    shutil.rmtree(root / iteration_name(_STEPS))
    (root / TRACKER).write_text(f"{_SAVED}\n")


def _train(space: Workspace, processes: int, settings: Settings) -> Ended:
    """Run the launcher until the last step."""
    precision = "bf16" if settings.has_gpus else "fp32"
    before = f"dsw auto 2 8 1e-3 1e-4 64 48 {precision} 1 1 1 false true true true none false {_SAVED}"
    paths = [str(space.train_data), "none", str(space.model)]
    positions = [*before.split(), *paths, str(_STEPS), "1", str(space.run)]
    flags = ["--overlapped-distributed-optimizer", "--deterministic-mode", "--reduce-bucket-size", "40000",
             "--cache-dir", str(space.root / "cache")]  # fmt: skip
    users = {name: value for name, value in os.environ.items() if name not in _SETTINGS and name[:3] != "MP_"}
    own = {"MP_DATASET_TYPE": "raw", "NPROC_PER_NODE": str(processes)}
    return run_program([sys.executable, str(_LAUNCHER), *positions, *flags], _RUN_S, {**users, **own})


def _tail(ended: Ended, space: Workspace) -> dict[str, str]:
    """The end of what a run said, without the temporary folder's name."""
    lines = (ended.output + ended.error).splitlines()[-30:]
    return {"last_lines": "\n".join(lines).replace(str(space.root), "FOLDER")}
