"""A short sharded run through the launcher: two steps and a checkpoint."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from toolkits._program import TRAIN, own_environment, run_program
from toolkits.doctor.check import Finding, Settings
from toolkits.quickstart.workspace import prepare

_STEPS = 2
_RUN_S = 240.0


def run_self_test(settings: Settings) -> Iterator[Finding]:
    """Train two steps with the overlapped optimizer on up to two processes, and save a checkpoint."""
    begin = time.perf_counter()
    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        space, _ = prepare(Path(folder), num_held_out=4, num_train=16)
        processes = min(2, settings.num_processes)
        on_gpus = settings.machine.cuda_devices > 0
        where = f"{processes} {'GPUs' if on_gpus else 'processes on the CPU'}"
        precision = "bf16" if on_gpus else "fp32"
        before = f"dsw auto 2 8 1e-3 1e-4 64 48 {precision} 1 1 1 false true true true none false {_STEPS}"
        positions = [*before.split(), str(space.train_data), "none", str(space.model), str(_STEPS), "1"]
        flags = ["--overlapped-distributed-optimizer", "--cache-dir", str(space.root / "cache")]
        command = [sys.executable, str(TRAIN), *positions, str(space.run), *flags]
        environment = own_environment(MP_DATASET_TYPE="raw", NPROC_PER_NODE=str(processes))
        ended = run_program(command, _RUN_S, environment)
        if ended.code != 0:
            lines = "\n".join((ended.output + ended.error).splitlines()[-30:])
            cure = "the JSON report has the run's last lines; attach it to an issue"
            data = {"last_lines": lines.replace(folder, "FOLDER")}
            yield Finding("training", "broken", f"{where}: {ended.reason[:300]}", cure, data)
            return
        what = f"{where}: {_STEPS} sharded steps and a checkpoint in {time.perf_counter() - begin:.0f} s"
        yield Finding("training", "ok", what, data={"losses": space.losses()})
