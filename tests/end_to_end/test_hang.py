"""A worker that is stopped (SIGSTOP) under the launcher: it is named, and the run ends with 5."""

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from end_to_end.conftest import Office
from end_to_end.shell import command, environment

from patch.storage.names import STACKS_FOLDER

pytestmark = pytest.mark.long


def test_run_with_a_stopped_worker_names_it_and_ends(office: Office, tmp_path: Path) -> None:
    positions = {**office.positions(tmp_path / "out"), "VALID_DATASET_PATH": "none"}
    arguments = [*command(**positions, TRAIN_TOKENS_OR_ITERS="100000"), "--hang-timeout=6"]
    with (tmp_path / "messages").open("w+") as messages:
        launcher = subprocess.Popen(arguments, env=environment(), stderr=messages)
        try:
            pid = stop_rank_1(launcher, tmp_path / "out" / "log" / "metrics.jsonl")
            code = launcher.wait(60)
        finally:
            launcher.kill()
        messages.seek(0)
        text = messages.read()
    assert code == 5, text
    assert f"ERROR rank 1 (process {pid} on " in text and ", T (stopped), in " in text, text
    assert text.count("has shown no sign of life") == 1, "one cause, not one for each rank"
    assert not psutil.pid_exists(pid)
    assert "patch/training/trainer.py" in (tmp_path / "out" / STACKS_FOLDER / "rank_0.txt").read_text()


def stop_rank_1(launcher: subprocess.Popen, metrics: Path) -> int:
    """Stop the worker of rank 1 when some steps are done; its process id."""
    deadline = time.monotonic() + 120
    while not (metrics.exists() and metrics.read_text().count("\n") >= 5):
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    (worker,) = (
        process
        for process in psutil.Process(launcher.pid).children(recursive=True)
        if process.environ().get("RANK") == "1"
    )
    worker.send_signal(signal.SIGSTOP)
    return worker.pid
