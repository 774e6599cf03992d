"""metrics.jsonl: what is kept on resume, and the plot."""

import json
from pathlib import Path

import pytest

from patch.training.metrics import MetricsLog, plot_losses, read_metrics


def _log_with(output: Path, iterations: range) -> None:
    log = MetricsLog(output, 0)
    for iteration in iterations:
        log.write({"iteration": iteration, "loss": 1.0 / iteration, "mfu": None})
    log.close()


def test_resume_cuts_the_file_back_to_the_checkpoint(tmp_path: Path) -> None:
    _log_with(tmp_path, range(1, 8))
    resumed = MetricsLog(tmp_path, 5)
    resumed.write({"iteration": 6, "loss": 9.0})
    resumed.close()
    lines = (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["iteration"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert json.loads(lines[-1])["loss"] == 9.0


def test_a_line_cut_off_by_a_crash_is_left_out(tmp_path: Path) -> None:
    _log_with(tmp_path, range(1, 3))
    path = tmp_path / "log" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    assert [record["iteration"] for record in read_metrics(path)] == [1]


@pytest.mark.parametrize(
    "records", [[], [{"iteration": 1, "loss": 2.0}, {"iteration": 1, "valid_loss": 2.5}]]
)
def test_plot_is_a_png_with_and_without_points(tmp_path: Path, records: list) -> None:
    plot_losses(records, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
