"""Small hooks of a run: the last save, the plot of losses."""

from pathlib import Path
from typing import Any

import pytest
from training_runs import messages_from

from patch.training.hooks import LastSaved, RateWarning, TrainerHook
from patch.training.metrics import LossPlot, MetricsLog, plot_losses


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
