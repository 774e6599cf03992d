"""log/loss.png: drawn at a save and at the end, with and without points."""

from pathlib import Path

import pytest

from patch.training.metrics import MetricsLog
from patch.training.run_hooks import LossPlot, plot_losses


@pytest.mark.parametrize(
    "records", [[], [{"iteration": 1, "loss": 2.0}, {"iteration": 1, "valid_loss": 2.5}]]
)
def test_plot_is_a_png_with_and_without_points(tmp_path: Path, records: list) -> None:
    plot_losses(records, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_each_validation_set_has_a_line_with_its_name(tmp_path: Path) -> None:
    records = [{"iteration": step, "valid_loss": 2.0, "valid_loss/chat": 2.0 - step} for step in (1, 2)]
    plots = []
    for number, shown in enumerate((records, [{**r, "valid_loss/code": 3.0} for r in records])):
        plot_losses(shown, tmp_path / f"{number}.png")
        plots.append((tmp_path / f"{number}.png").read_bytes())
    assert plots[0] != plots[1]


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


def test_plot_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, logged: list[str]) -> None:
    """As on a full disk: what must not be lost, metrics and checkpoints, ends it with its own error."""
    (tmp_path / "log" / "loss.png").mkdir(parents=True)
    LossPlot(tmp_path).on_save(1)
    assert logged == [f"{tmp_path / 'log' / 'loss.png'} was not drawn: Is a directory"]
