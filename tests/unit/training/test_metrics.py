"""metrics.jsonl: what is kept on resume."""

import json
from pathlib import Path

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


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    _log_with(tmp_path, range(1, 3))
    path = tmp_path / "log" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert [record["iteration"] for record in read_metrics(path)] == [1]


def test_evaluations_are_lines_of_their_own(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0)
    log.on_log({"iteration": 1, "loss": 2.0})
    log.on_evaluate({"iteration": 1, "valid_loss": 2.5})
    log.close()
    assert read_metrics(tmp_path / "log" / "metrics.jsonl") == [
        {"iteration": 1, "loss": 2.0},
        {"iteration": 1, "valid_loss": 2.5},
    ]
