"""What stops a run: signals on any rank, the time limit, the stop file; each leaves one checkpoint."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from training_runs import build_seeded_run, messages_from

from patch.launch.worker_process import LAUNCHER
from patch.training.guards import stop
from patch.training.hooks.hook import TrainerHook
from patch.training.trainer import Trainer

NUM_STEPS = 400


class Asking(TrainerHook):
    """After step 2 the last rank gets a signal, or the user creates the stop file."""

    def __init__(self, number: int | None, file: Path | None) -> None:
        self._number, self._file = number, file

    def on_step(self, iteration: int, seconds: float) -> None:
        if iteration == 2 and dist.get_rank() == dist.get_world_size() - 1:
            if self._number is not None:
                os.kill(os.getpid(), self._number)
                os.kill(os.getpid(), signal.SIGTERM)  # as SLURM does at its limit
            if self._file is not None:
                self._file.touch()
        if self._file is not None:
            time.sleep(0.01)  # the file is looked for by the clock, not by the step


def stop_early(
    rank: int, world_size: int, folder: str, cases: dict[str, dict[str, Any]]
) -> dict[str, tuple[int, list[str], str]]:
    """Of each case: the exit code, the checkpoints, and what rank 0 logs."""
    stop.POLL_S = 0.02
    lines = messages_from("INFO")
    found = {}
    for name, case in cases.items():
        lines.clear()
        output = Path(folder) / name
        file = Path(case["file"]) if "file" in case else None
        changes = {"train_iters": NUM_STEPS, "output_path": str(output), **case.get("changes", {})}
        run = build_seeded_run(small_run(dp=world_size, num_layers=1, **changes))
        run.data.valid_readers = {}
        code = Trainer(run, [Asking(case.get("signal"), file)]).train()
        saved = sorted(path.name for path in (output / "checkpoint").glob("iter_*"))
        found[name] = (code, saved, "\n".join(lines))
        new_job()
    return found


def test_each_request_saves_one_checkpoint_and_has_its_exit_code(tmp_path: Path) -> None:
    elsewhere = tmp_path / "of_the_team"
    cases: dict[str, dict[str, Any]] = {
        "usr1": {"signal": signal.SIGUSR1},
        "usr2": {"signal": signal.SIGUSR2},
        "limit": {"changes": {"exit_duration_in_mins": 1e-6}},
        "done": {"changes": {"exit_duration_in_mins": 1e-6, "train_iters": 1}},
        "file": {"file": tmp_path / "file" / "STOP"},
        "other": {"file": elsewhere, "changes": {"stop_file": str(elsewhere)}},
    }
    (tmp_path / "file").mkdir()
    first, second = run_distributed(stop_early, 2, str(tmp_path), cases)
    assert {name: code for name, (code, *_) in first.items()} == {
        "usr1": 138, "usr2": 140, "limit": 75, "done": 0, "file": 130, "other": 130
    }  # fmt: skip
    assert {name: code for name, (code, *_) in second.items()} == {name: first[name][0] for name in first}
    checkpoints = {name: saved for name, (_, saved, _) in first.items()}
    assert checkpoints["usr1"] == checkpoints["usr2"] == ["iter_0000002"]
    assert checkpoints["limit"] == checkpoints["done"] == ["iter_0000001"]
    for name in ("file", "other"):
        (saved,) = checkpoints[name]
        assert 2 <= int(saved.removeprefix("iter_")) < NUM_STEPS, saved
    messages = {name: text for name, (_, _, text) in first.items()}
    assert "the same command resumes; stopped by SIGUSR1" in messages["usr1"]
    assert "--exit-duration-in-mins" in messages["limit"] and "stopped" not in messages["done"]
    assert f"the stop file {elsewhere}, which must be removed first" in messages["other"]


def ask_for_time(rank: int, world_size: int) -> list[int]:
    """The exit codes with a limit that this process has not reached, but the one that started it has."""
    now = time.time()
    younger, older = (now - psutil.Process(pid).create_time() for pid in (os.getpid(), os.getppid()))
    config = small_run(exit_duration_in_mins=(younger + older) / 2 / 60)
    alone = stop.StopRequests(config).exit_code(is_last=False)
    os.environ[LAUNCHER] = str(os.getppid())
    return [alone, stop.StopRequests(config).exit_code(is_last=False)]


def test_time_is_that_of_the_launcher_whose_restarts_do_not_prolong_it() -> None:
    assert run_distributed(ask_for_time, 1) == [[0, 75]]


@pytest.mark.timeout(100)
def test_stop_file_that_is_there_is_not_looked_for_in_the_training_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file system that hangs holds up its own thread alone."""
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(stop, "POLL_S", 0.01)
    looking = threading.Event()
    monkeypatch.setattr(Path, "exists", lambda path: looking.set() or time.sleep(600))
    requests = stop.StopRequests(small_run(output_path=str(tmp_path)))
    with requests.listening():
        looking.wait()
        assert requests.exit_code(is_last=False) == 0
