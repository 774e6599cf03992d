"""Shows the progress of a run: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from rich.progress import MofNCompleteColumn, TextColumn

from patch.logger import get_logger
from patch.progress import LineTimer, ProgressBar, is_terminal
from patch.training.hooks import Record, TrainerHook

_logger = get_logger(__name__)


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
