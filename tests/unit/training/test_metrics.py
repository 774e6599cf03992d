"""metrics.jsonl: what is kept on resume."""

import json
from pathlib import Path

import pytest
from full_disk import disk_full_after
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from patch.errors import CheckpointError
from patch.training.metrics import MetricsLog, read_metrics


def _log_with(output: Path, iterations: range) -> None:
    log = MetricsLog(output, 0)
    for iteration in iterations:
        log.on_log({"iteration": iteration, "loss": 1.0 / iteration, "mfu": None})
    log.close()


def test_resume_cuts_the_file_back_to_the_checkpoint(tmp_path: Path) -> None:
    _log_with(tmp_path, range(1, 8))
    resumed = MetricsLog(tmp_path, 5)
    resumed.on_log({"iteration": 6, "loss": 9.0})
    resumed.close()
    lines = (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert json.loads(lines[-1])["loss"] == 9.0


@pytest.mark.parametrize(
    "line",
    [
        *("5", "[1]", "{}", '{"iteration": "x"}', '{"iteration": 1, "loss": "x"}', "[" * 100_000),
        '{"iteration": 3, "lo',  # cut off by a crash
    ],
)
def test_lines_that_are_no_records_are_left_out(tmp_path: Path, line: str) -> None:
    _log_with(tmp_path, range(1, 3))
    with (tmp_path / "log" / "metrics.jsonl").open("a") as file:
        file.write(line)
    assert [record["iteration"] for record in read_metrics(tmp_path / "log" / "metrics.jsonl")] == [1, 2]


def test_tensorboard_reads_the_scalars_and_what_a_resume_takes_back(tmp_path: Path) -> None:
    _log_with(tmp_path, range(1, 6))
    resumed = MetricsLog(tmp_path, 3)
    resumed.on_log({"iteration": 4, "loss": 9.0})
    resumed.close()
    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in board.Scalars("loss")]
    assert found == [(1, 1.0), (2, 0.5), (3, pytest.approx(1 / 3)), (4, 9.0)]
    assert board.Tags()["scalars"] == ["loss"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_disk_that_fills_up_is_one_error_of_the_run(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    with (
        disk_full_after(2000),
        pytest.raises(CheckpointError, match="could not be written: .*File too large"),
    ):
        for iteration in range(1, 1000):
            log.on_log({"iteration": iteration, "loss": 1.0})
    log.close()
