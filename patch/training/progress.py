"""The run as a person sees it: a progress bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from patch.logger import get_logger

_logger = get_logger(__name__)
_LINE_EVERY_S = 10.0


class Display:
    """Shows steps and evaluations on stderr.

    Plain lines come at the first and the last step, and at most every ten seconds in between.
    """

    def __init__(self, start_iteration: int, train_iters: int) -> None:
        self._train_iters = train_iters
        self._began, self._start = time.monotonic(), start_iteration
        self._last_line = float("-inf")
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(
                "training", total=train_iters, completed=start_iteration, state=""
            )
            self._bar.start()
            _log_to_stderr()

    def step(self, record: dict[str, Any]) -> None:
        """Show one logged step."""
        iteration = record["iteration"]
        state = f"loss {record['loss']:.4f}  {record['tokens_per_s_per_gpu']:,.0f} tokens/s per process"
        if self._bar is not None:
            self._bar.update(self._task, completed=iteration, state=state)
            return
        now = time.monotonic()
        if iteration < self._train_iters and now - self._last_line < _LINE_EVERY_S:
            return
        self._last_line = now
        left = (now - self._began) / (iteration - self._start) * (self._train_iters - iteration)
        _logger.info(
            "step %d/%d  %s  grad norm %.3f  lr %.3g  %.0f s left",
            iteration, self._train_iters, state, record["grad_norm"], record["lr"], left,
        )  # fmt: skip

    def evaluation(self, record: dict[str, Any]) -> None:
        """Show one evaluation."""
        message = (
            f"step {record['iteration']}  validation loss {record['valid_loss']:.4f}  "
            f"perplexity {record['valid_ppl']:.3f}"
        )
        if self._bar is not None:
            self._bar.console.print(message)
        else:
            _logger.info(message)

    def close(self) -> None:
        """Give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            _log_to_stderr()


def _log_to_stderr() -> None:
    """Let the project's log follow sys.stderr, which a live bar replaces to keep lines above itself."""
    for handler in get_logger("patch").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)
