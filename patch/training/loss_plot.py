"""log/loss.png: training and validation loss over the steps, drawn after every save and at the end."""

from __future__ import annotations

from pathlib import Path

from patch.logger import get_logger
from patch.storage.names import LOSS_PLOT_FILE, METRICS_FILE
from patch.training.hooks import Record, TrainerHook
from patch.training.metrics import read_metrics

_logger = get_logger(__name__)


class LossPlot(TrainerHook):
    """Draws the losses in metrics.jsonl. A plot that cannot be written is only logged: it can be drawn later.

    Args:
        output: the run's folder.
    """

    def __init__(self, output: Path) -> None:
        self._metrics, self._path = output / METRICS_FILE, output / LOSS_PLOT_FILE

    def on_save(self, iteration: int) -> None:
        """Draw the losses up to the checkpoint."""
        self._draw()

    def close(self) -> None:
        """Draw all losses."""
        self._draw()

    def _draw(self) -> None:
        try:
            plot_losses(read_metrics(self._metrics), self._path)
        except OSError as error:
            _logger.error("%s was not drawn: %s", self._path, error.strerror)


def plot_losses(records: list[Record], path: Path) -> None:
    """Draw training and validation loss over the steps into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="iteration", ylabel="loss (mean over learned tokens)")
    of_sets = dict.fromkeys(key for record in records for key in record if key.startswith("valid_loss/"))
    lines = [("loss", "training", "-"), ("valid_loss", "validation", "o-")]
    lines += [(key, key.removeprefix("valid_loss/"), ".--") for key in of_sets]
    for key, label, style in lines:
        points = [(record["iteration"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label, linewidth=1, markersize=4)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)
