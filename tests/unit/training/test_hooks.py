"""Small hooks of a run: the last save, the plot of losses, and metrics.jsonl with what a resume keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
from full_disk import disk_full_after
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import messages_from

from patch.errors import CheckpointError
from patch.training.hooks.hook import LastSaved, RateWarning, TrainerHook
from patch.training.hooks.metrics import LossPlot, MetricsLog, plot_losses, read_metrics


def test_file_names_the_last_saved_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "log" / "last_saved_iteration.txt"
    file.parent.mkdir()
    hook = LastSaved(tmp_path)
    assert not file.exists()
    for iteration in (10, 20, 15):
        hook.on_save(iteration)
        assert file.read_text() == f"{iteration}\n"


@pytest.mark.parametrize(
    ("hook", "name", "said"),
    [(LastSaved, "last_saved_iteration.txt", "written"), (LossPlot, "loss.png", "drawn")],
)
def test_file_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, logged: list[str], hook: type[Any], name: str, said: str
) -> None:
    """The checkpoint is there all the same; metrics, which must not be lost, end it with their own error."""
    (tmp_path / "log" / name).mkdir(parents=True)
    made: TrainerHook = hook(tmp_path)
    made.on_save(1)
    assert logged == [f"{tmp_path / 'log' / name} was not {said}: Is a directory"]


def test_each_kind_of_loss_has_its_line_in_a_png(tmp_path: Path) -> None:
    losses = [{"iteration": step, "loss": 2.0, "valid_loss": 2.0} for step in (1, 2)]
    of_sets = [{**record, "valid_loss/chat": 1.5} for record in losses]
    of_experts = [{**record, "expert_load_max/2": 1.5} for record in losses]
    plots = []
    for number, records in enumerate(([], losses, of_sets, of_experts)):
        plot_losses(records, tmp_path / f"{number}.png")
        plots.append((tmp_path / f"{number}.png").read_bytes())
    assert len(set(plots)) == 4 and all(plot.startswith(b"\x89PNG") for plot in plots)


def test_plot_is_drawn_again_at_every_save_and_at_the_end(tmp_path: Path) -> None:
    log, plot = MetricsLog(tmp_path, 0), LossPlot(tmp_path)
    picture = tmp_path / "log" / "loss.png"
    drawn = []
    for iteration, finish in ((1, lambda: plot.on_save(1)), (2, plot.close)):
        log.on_log({"iteration": iteration, "loss": 1.0 / iteration})
        assert picture.exists() == bool(drawn)
        finish()
        drawn.append(picture.read_bytes())
    log.close()
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("losses", "named"),
    [((7.0, 9.0, 69.0), 0), ((7.0, 9.0, 71.0, 80.0), 3), ((0.001, 0.9), 0), ((1.0, *[2.0] * 99, 11.0), 0)],
)
def test_loss_that_grows_tenfold_in_the_first_steps_names_the_rate_once(losses, named) -> None:
    lines, hook = messages_from("WARNING"), RateWarning(5.0)
    for step, loss in enumerate(losses, 1):
        hook.on_log({"iteration": step, "loss": loss})
    cause = "The rate is probably too high: --lr (position 5 LR) is 5"
    assert lines == [f"step 3: the loss has grown tenfold, to 71. {cause}"] * bool(named)


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
