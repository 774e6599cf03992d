"""The base class of the training loop's hooks, and small hooks: progress, last save, traces of --profile.

A new hook is a subclass of `TrainerHook` and a line in `worker.build_hooks`; an external program registers
its hook (`patch.training.register_hook`).

log/last_saved_iteration.txt tells a job script whether the run makes progress. The tracker file cannot: with
--save URL it is in the store, and a tracker file on the disk is older than --save.

A trace has the phases of each step, the reductions and gathers of buckets, the copies and updates of chunks,
and waits, all by name. Perfetto and chrome://tracing show it.
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

    Hooks are called in the order of the trainer's list. All ranks call the same methods at the same steps
    with the same records. A hook that only writes files belongs on rank 0 alone; other ranks wait for it only
    in `evaluate` and after a save. A hook that uses collectives belongs on every rank, in the same order.
    """

    interval = 0
    """Number of steps between calls of `evaluate`, which also follows the last step; 0: never."""
    at_start = False
    """Whether `evaluate` is also called before the first step of a new run; such a hook is on every rank."""

    def evaluate(self, iteration: int) -> Record:
        """Return numbers by name for this rank's evaluation record (`on_evaluate`).

        Only rank 0 writes metrics.jsonl, and the caller reduces nothing. So the hook itself broadcasts its
        numbers and agrees on errors (`on_all_ranks`). Only the last pipeline stage has losses. The call is
        inside `evaluating`, where all ranks wait for its end; it does not count as step time.
        """
        return {}

    def on_step(self, iteration: int, seconds: float) -> None:
        """Receive every step, counted from 1, and its time on this rank without evaluations and saves."""

    def on_log(self, record: Record) -> None:
        """Receive the record every `--log-interval` steps and after the last step: maxima over ranks."""

    def on_evaluate(self, record: Record) -> None:
        """Receive an evaluation: `iteration`, metrics of validation sets, results of hooks' `evaluate`."""

    def on_save(self, iteration: int) -> None:
        """Receive a complete checkpoint; all ranks wait for each other afterwards.

        A checkpoint that is written in the background is complete some steps after `iteration`.
        """

    def close(self) -> None:
        """Release resources at the end of training: after the last step, a stop request or an error."""


class LastSaved(TrainerHook):
    """Writes the iteration of each complete checkpoint (disk or store); create it after `MetricsLog`."""

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

    Without a terminal, it logs the first and the last step, and at most every ten seconds between them.
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
        of_sets = [key for key in record if key.startswith("valid_loss/")]
        if of_sets:
            losses = (f"{key.removeprefix('valid_loss/')} {record[key]:.4f}" for key in of_sets)
            message += f"  ({', '.join(losses)})"
        others = (key for key in record if key != "iteration" and not key.startswith("valid_"))
        message += "".join(f"  {key} {record[key]:.4f}" for key in others if not key.endswith("_stderr"))
        if self._bar is not None:
            self._bar.print(message)
        else:
            _logger.info(message)

    def close(self) -> None:
        """Remove the progress bar from the terminal."""
        if self._bar is not None:
            self._bar.close()


class RateWarning(TrainerHook):
    """Warns once about the peak learning rate `lr` if the loss grows tenfold in the first 100 steps."""

    def __init__(self, lr: float) -> None:
        self._lr, self._limit = lr, 0.0
        """Ten times the first loss, but at least 1."""

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
    """Profiles steps and writes log/traces/rank_N.json.gz; an error that ends the run cuts the trace short.

    Args:
        steps: numbers of the steps, counted from 1.
        num_before: finished steps, which are not recorded.
        settle: waits for the step's messages in flight. gloo's threads report their end to the profiler, and
            crash the process if the profiler has stopped meanwhile (seen with torch 2.13).
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
        """Stop after the last step to record, start before the first one."""
        if iteration == self._steps[-1]:
            self._settle()
            self.close()
        self._start_before(iteration + 1)

    def _start_before(self, iteration: int) -> None:
        if self._profiler is None and iteration in self._steps:
            self._profiler = step_profiler(is_cuda=self._is_cuda)
            self._profiler.start()

    def close(self) -> None:
        """Write the trace recorded so far."""
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
