"""Hooks, which the training loop calls: their base class, and the small ones of a run.

A new hook is a subclass of `TrainerHook` and a line in `worker.build_hooks`; that of another program is
registered (`patch.training.register_hook`). Here are progress, the last save and the traces
of --profile; metrics and checkpoints have own files.

log/last_saved_iteration.txt tells a job's script whether a run gets on. The tracker does not: with --save URL
it is in the store, and one on the disk is of a checkpoint from before --save was given.

A trace has the phases of each step, the buckets' reductions and gathers, the chunks' copies and updates, and
waits, by name. Perfetto and chrome://tracing draw it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.progress import MofNCompleteColumn, TextColumn
from torch.profiler import profile

from patch.compat.torch_internals import step_profiler
from patch.config.positions import where
from patch.logger import get_logger
from patch.progress import LineTimer, ProgressBar, is_terminal
from patch.storage.atomic import write_atomically
from patch.storage.names import LAST_SAVED_FILE, TRACES_FOLDER

_logger = get_logger(__name__)

Record = dict[str, Any]
"""One object of log/metrics.jsonl."""


class TrainerHook:
    """A hook of the training loop; a subclass overrides the methods that it needs.

    Hooks are called in the order of the trainer's list. All ranks call the same methods at the same steps,
    with the same records. A hook that only writes files belongs in the list of rank 0 alone; the other ranks
    wait for it in `evaluate` and after a save, but not at other times. A hook that uses collectives belongs
    in the list of every rank, and several such hooks must have the same order on all ranks.
    """

    interval = 0
    """`evaluate` is called after so many steps each, and after the last one; 0: never."""
    at_start = False
    """Whether it is also called before the first step of a run that begins; such a hook is on every rank."""

    def evaluate(self, iteration: int) -> Record:
        """Numbers by name, for the record of this step's evaluation (`on_evaluate`) on this rank.

        metrics.jsonl is of rank 0, and nothing is reduced here: a hook spreads its numbers, and agrees on
        errors (`on_all_ranks`). With pipeline stages the last one alone has losses. Called in the context
        `evaluating`, where all ranks wait until it has ended; no step's time has it.
        """
        return {}

    def on_step(self, iteration: int, seconds: float) -> None:
        """Called after every step.

        Args:
            iteration: number of the step, counted from 1.
            seconds: time of the step on this rank, without evaluations and saves.
        """

    def on_log(self, record: Record) -> None:
        """Called every `--log-interval` steps and after the last step; metrics are the largest over ranks."""

    def on_evaluate(self, record: Record) -> None:
        """Called after an evaluation, with `iteration` and the metrics of all that were due.

        These are `valid_loss` and its like of validation sets, and what hooks' `evaluate` gave.
        """

    def on_save(self, iteration: int) -> None:
        """Called after a checkpoint is complete; all ranks wait for each other afterwards.

        A checkpoint that is written in the background is complete some steps after its own.
        """

    def close(self) -> None:
        """Called at the end of training: after the last step, a signal or an error."""


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
        message = f"step {record['iteration']}"
        if "valid_loss" in record:
            message += f"  validation loss {record['valid_loss']:.4f}"
        if "valid_ppl" in record:
            message += f"  perplexity {record['valid_ppl']:.3f}"
        prefix = "valid_loss/"
        losses = {key: loss for key, loss in record.items() if key.startswith(prefix)}
        if losses:
            each = ", ".join(f"{key.removeprefix(prefix)} {loss:.4f}" for key, loss in losses.items())
            message += f"  ({each})"
        of_hooks = (key for key in record if key != "iteration" and not key.startswith("valid_"))
        of_hooks = (key for key in of_hooks if not key.endswith("_stderr"))
        message += "".join(f"  {key} {record[key]:.4f}" for key in of_hooks)
        if self._bar is not None:
            self._bar.print(message)
        else:
            _logger.info(message)

    def close(self) -> None:
        """Remove the progress bar from the terminal."""
        if self._bar is not None:
            self._bar.close()


class RateWarning(TrainerHook):
    """Names the learning rate once, if the loss grows tenfold in the first 100 steps.

    Args:
        lr: the run's peak rate.
    """

    def __init__(self, lr: float) -> None:
        self._lr, self._limit = lr, 0.0
        """Ten times the first loss; of a first loss near 0, that of 0.1."""

    def on_log(self, record: Record) -> None:
        """Compare a logged loss with the first one."""
        loss = record["loss"]
        if not math.isfinite(loss):
            return
        self._limit = self._limit or 10 * max(loss, 0.1)
        if record["iteration"] <= 100 and loss > self._limit:
            self._limit = math.inf
            said = "step %d: the loss has grown tenfold, to %.4g. The rate is probably too high: %s is %g"
            _logger.warning(said, record["iteration"], loss, where("lr"), self._lr)


class StepProfile(TrainerHook):
    """Records steps and writes log/traces/rank_0.json.gz; an error that ends the run cuts the trace short.

    Args:
        output: the run's folder.
        steps: counted from 1.
        rank: of this process in the job.
        num_before: steps that are done; those of `steps` that are among them are not recorded.
        is_cuda: whether the GPU is recorded.
        settle: waits for the messages that a step leaves under way. gloo's threads report their end to the
            profiler, and crash the process if it has stopped meanwhile (seen with torch 2.13).
    """

    def __init__(
        self,
        output: Path,
        steps: range,
        rank: int,
        num_before: int,
        *,
        is_cuda: bool,
        settle: Callable[[], None],
    ) -> None:
        self._file = output / TRACES_FOLDER / f"rank_{rank}.json.gz"
        self._steps, self._is_cuda, self._settle = steps, is_cuda, settle
        self._profiler: profile | None = None
        self._start_before(num_before + 1)

    def on_step(self, iteration: int, seconds: float) -> None:
        """End after the last step to record, begin before the first one."""
        if iteration == self._steps[-1]:
            self._settle()
            self._finish()
        self._start_before(iteration + 1)

    def close(self) -> None:
        """Write what there is."""
        self._finish()

    def _start_before(self, iteration: int) -> None:
        if self._profiler is None and iteration in self._steps:
            self._profiler = step_profiler(is_cuda=self._is_cuda)
            self._profiler.start()

    def _finish(self) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._profiler.export_chrome_trace(str(self._file))
            _logger.info("steps %d to %d are in %s", self._steps[0], self._steps[-1], self._file)
        except (OSError, RuntimeError) as error:  # the training itself goes on
            _logger.warning("%s was not written: %s", self._file, error)
        self._profiler = None
