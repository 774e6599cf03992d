"""Small hooks of a run: progress, the plot of the loss, the last save, a forecast of the step's time.

log/last_saved_iteration.txt tells a job's script whether a run gets on. The tracker does not: with --save URL
it is in the store, and the one on the disk is of a copy that the store once refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rich.progress import MofNCompleteColumn, TextColumn

from patch.logger import get_logger
from patch.optimizer import OptimizerReport, OverlappedDistributedOptimizer
from patch.progress import LineTimer, ProgressBar, is_terminal
from patch.storage.atomic import write_atomically
from patch.storage.names import LAST_SAVED_FILE, LOSS_PLOT_FILE, METRICS_FILE
from patch.training.hooks import Record, TrainerHook
from patch.training.metrics import read_metrics

_logger = get_logger(__name__)


class LastSaved(TrainerHook):
    """Writes the number of each checkpoint that is complete, wherever it is; created after `MetricsLog`.

    Args:
        output: the run's folder.
    """

    def __init__(self, output: Path) -> None:
        self._file = output / LAST_SAVED_FILE

    def on_save(self, iteration: int) -> None:
        """Write the file; a failure is only logged, because the checkpoint itself is there."""
        try:
            write_atomically(self._file, f"{iteration}\n")
        except OSError as error:
            _logger.warning("%s was not written: %s", self._file, error.strerror)


class ProgressDisplay(TrainerHook):
    """Shows steps and evaluations on stderr.

    Plain lines are written at the first and the last step, and at most every ten seconds between them.

    Args:
        start_iteration: number of steps already done.
        train_iters: number of steps of the whole run.
    """

    def __init__(self, start_iteration: int, train_iters: int) -> None:
        self._start, self._train_iters = start_iteration, train_iters
        self._timer = LineTimer(due_at_once=True)
        self._bar: ProgressBar | None = None
        if is_terminal():
            columns = (MofNCompleteColumn(), TextColumn("{task.fields[state]}"))
            self._bar = ProgressBar("training", train_iters, *columns, completed=start_iteration, state="")

    def on_log(self, record: Record) -> None:
        """Show one logged step."""
        iteration = record["iteration"]
        state = f"loss {record['loss']:.4f}  {record['tokens_per_s_per_gpu']:,.0f} tokens/s per process"
        if self._bar is not None:
            self._bar.update(iteration, state=state)
        elif self._timer.is_due() or iteration >= self._train_iters:
            left = self._timer.seconds_left(iteration - self._start, self._train_iters - self._start)
            _logger.info(
                "step %d/%d  %s  grad norm %.3f  lr %.3g  %.0f s left",
                iteration, self._train_iters, state, record["grad_norm"], record["lr"], left,
            )  # fmt: skip

    def on_evaluate(self, record: Record) -> None:
        """Show one evaluation."""
        message = (
            f"step {record['iteration']}  validation loss {record['valid_loss']:.4f}  "
            f"perplexity {record['valid_ppl']:.3f}"
        )
        prefix = "valid_loss/"
        losses = {key: loss for key, loss in record.items() if key.startswith(prefix)}
        if losses:
            each = ", ".join(f"{key.removeprefix(prefix)} {loss:.4f}" for key, loss in losses.items())
            message += f"  ({each})"
        if self._bar is not None:
            self._bar.print(message)
        else:
            _logger.info(message)

    def close(self) -> None:
        """Remove the progress bar from the terminal."""
        if self._bar is not None:
            self._bar.close()


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


class _Step(NamedTuple):
    """Times of one step."""

    seconds: float
    host_wait_s: float
    """Seconds that the step waited for updates on the host."""
    host_busy_s: float
    """Seconds that the host spent on updating chunks."""


class StepTimeForecast:
    """Predicts the step time when the offload fraction changes, and logs it with the measured time.

    Model: the part of the host's work that overlapped with the device's work stays the same in seconds; the
        rest
    of the host's work at the new fraction adds to the step. The update on the device is short and ignored.

    Args:
        start: the optimizer's report before the first step.
    """

    def __init__(self, start: OptimizerReport) -> None:
        self._last = start
        self._before: _Step | None = None
        """The last step without a move before it."""
        self._predicted: float | None = None

    def note(self, seconds: float, report: OptimizerReport) -> None:
        """Record a step.

        Args:
            seconds: the time of the step.
            report: the optimizer's report after the step.
        """
        waited = report.host_wait_s - self._last.host_wait_s
        step = _Step(seconds, waited, report.host_busy_s - self._last.host_busy_s)
        fraction, last_fraction = report.offload_fraction, self._last.offload_fraction
        self._last = report
        if fraction != last_fraction:  # this step contains the move itself; measure the next one
            self._predicted = self._predict(fraction, last_fraction)
            return
        if self._predicted is not None and self._before is not None:
            _logger.info(
                "optimizer offload: fraction %.3f: %.1f ms predicted, %.1f ms measured, %.1f ms before",
                fraction, self._predicted * 1e3, seconds * 1e3, self._before.seconds * 1e3,
            )  # fmt: skip
            self._predicted = None
        self._before = step

    def _predict(self, fraction: float, last_fraction: float) -> float | None:
        if self._before is None or not last_fraction:
            return None
        seconds, waited, busy = self._before
        hidden = max(0.0, busy - waited)
        return seconds - waited + max(0.0, busy * fraction / last_fraction - hidden)


class StepTimeHook(TrainerHook):
    """Passes the time of each step to the forecast. Every rank has one, because each moves its own states."""

    def __init__(self, optimizer: OverlappedDistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._forecast = StepTimeForecast(optimizer.report())

    def on_step(self, iteration: int, seconds: float) -> None:
        """Record the time of a step."""
        self._forecast.note(seconds, self._optimizer.report())
