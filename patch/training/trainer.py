"""The training loop: step, log, evaluate, save. On a stop request it saves a checkpoint and ends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial

from patch.compat.torch_internals import region
from patch.data.order import read_ahead
from patch.distributed.collectives import barrier, is_on_all_ranks, max_over_world, on_all_ranks
from patch.errors import TrainingError
from patch.logger import get_logger
from patch.training.evaluation import evaluate, evaluating
from patch.training.guards.non_finite import named_samples, samples_of_step
from patch.training.guards.phases import Phase
from patch.training.guards.stop import StopRequests
from patch.training.hooks.hook import Record, TrainerHook
from patch.training.hooks.metrics import loads_of_experts, make_record, measured
from patch.training.saving import CheckpointSaver
from patch.training.setup import Run
from patch.training.step import StepResult, train_step

_logger = get_logger(__name__)


class Trainer:
    """The training loop of a run; it calls the hooks in the given order and closes them at the end."""

    def __init__(self, run: Run, hooks: Sequence[TrainerHook]) -> None:
        self.run, self._hooks = run, hooks
        self._requests = StopRequests(run.config)
        self._saving = CheckpointSaver(run, self._on_save)
        self._exit_code = 0
        """The exit code with which all ranks agreed to stop, or 0; one rank's request may be a step older."""
        self._is_writing = False
        """Whether any rank was writing a checkpoint in the background at the last agreement (`_share`)."""
        self._is_evaluating = False
        """Whether a hook of any rank evaluates after the step of the last agreement."""
        self._step_begin = 0.0

    def train(self) -> int:
        """Train until the last step, or until any rank receives a stop request.

        Returns:
            the exit code: 0 after the last step, otherwise that of the stop request (see `stop`).
        Raises:
            TrainingError: the loss or the gradients are not finite.
            CheckpointError: a checkpoint cannot be written.
        """
        self._step_begin = time.perf_counter()
        run, data = self.run, self.run.data
        steps = range(run.start_iteration, run.config.training.train_iters)
        try:
            with (
                self._requests.listening(),
                read_ahead(data.train_reader, steps, run.config.data.data_prefetch) as data.train_reader,
            ):
                self._run_steps(steps)
        finally:
            run.phases.enter(Phase.END)
            self._saving.abandon()  # does nothing unless an error of this rank ends the run
            for hook in self._hooks:
                hook.close()
        if self._exit_code:
            reason = self._requests.reason(self._exit_code)
            _logger.info("a checkpoint was saved, the same command resumes; stopped by %s", reason)
        return self._exit_code

    def _run_steps(self, steps: range) -> None:
        at_start = [hook for hook in self._hooks if hook.at_start and not steps.start]
        if at_start:
            self._evaluate(0, at_start, has_sets=False)
            self._step_begin = time.perf_counter()
        try:
            for iteration in steps:
                self._step(iteration)
                if self._exit_code:
                    break
        except Exception as error:
            if is_on_all_ranks(error):
                self.run.phases.enter(Phase.SAVE)
                self._saving.complete()
            raise

    def _step(self, iteration: int) -> None:
        config, done = self.run.config, iteration + 1
        is_last = done == config.training.train_iters
        with region("step %d", done):
            result = train_step(self.run, iteration, self._saving.wait_for_copies)
            self.run.phases.end_region()
        # A step is timed from gradient norm to gradient norm: the GPU may still be busy with the update.
        now = time.perf_counter()
        seconds, self._step_begin = now - self._step_begin, now
        self.run.phases.enter(Phase.METRICS)
        for hook in self._hooks:
            hook.on_step(done, seconds)
        own = measured(self.run, result, seconds * 1e3) | self._saving.measured()
        due = [hook for hook in self._hooks if hook.interval and (is_last or done % hook.interval == 0)]
        worst = self._share(own, is_last=is_last, is_due=bool(due))
        self._check(iteration, result, worst["loss"])
        if done % config.checkpoint.log_interval == 0 or is_last:
            record = make_record(self.run, done, result, worst) | loads_of_experts(self.run)
            for hook in self._hooks:
                hook.on_log(record)
            self._saving.clear()
        is_saving_step = done % config.checkpoint.save_interval == 0 or is_last
        interval = config.data.eval_interval
        tasks = [self._go_on] if self._saving.pending is not None and not self._is_writing else []
        is_turn = interval and (done % interval == 0 or is_saving_step)
        has_sets = bool(self.run.data.valid_readers and is_turn)
        if has_sets or self._is_evaluating:
            tasks.append(partial(self._evaluate, due=due, has_sets=has_sets))
        if is_saving_step or self._exit_code:
            tasks.append(self._save)
        if self._exit_code:  # save first: the scheduler may kill the run during a long evaluation
            tasks.reverse()
        for task in tasks:
            task(done)
            self._step_begin = time.perf_counter()
        self.run.phases.end_step(seconds)

    def _share(self, measured: dict[str, float], *, is_last: bool, is_due: bool) -> dict[str, float]:
        """Return each metric's maximum over ranks; the same all-reduce agrees on stop, writes, evaluation."""
        pending = self._saving.pending
        own = {
            **measured, "exit code": self._requests.exit_code(is_last=is_last),
            "writing": pending is not None and pending.is_busy, "evaluating": is_due,
        }  # fmt: skip
        found = max_over_world([*map(float, own.values())], self.run.device)
        worst = dict(zip(own, found, strict=True))
        self._exit_code = int(worst.pop("exit code"))
        self._is_writing, self._is_evaluating = bool(worst.pop("writing")), bool(worst.pop("evaluating"))
        return worst

    def _check(self, iteration: int, result: StepResult, loss: float) -> None:
        """Raise a TrainingError if the loss is not finite although finite gradients let the update happen."""
        if not math.isfinite(loss) and not result.skipped:
            samples = named_samples(self.run, samples_of_step(self.run, iteration))
            message = (
                f"step {iteration + 1}: loss {loss}, expected a finite number; the gradient norm is "
                f"{result.grad_norm}. Look at its samples: {samples}"
            )
            raise on_all_ranks(TrainingError(message))

    def _evaluate(self, done: int, due: list[TrainerHook], *, has_sets: bool) -> None:
        record: Record = {"iteration": done}
        if has_sets:
            record |= evaluate(self.run)
        if due or self._is_evaluating:
            with evaluating(self.run):
                for hook in due:
                    record |= hook.evaluate(done)
        for hook in self._hooks:
            hook.on_evaluate(record)

    def _go_on(self, done: int) -> None:
        if self._saving.pending is not None:  # after a stop request, `_save` ran first and completed it
            self.run.phases.enter(Phase.SAVE)
            self._saving.go_on()

    def _save(self, done: int) -> None:
        self.run.phases.enter(Phase.SAVE)
        is_last = done == self.run.config.training.train_iters
        self._saving.save(done, is_end=is_last or self._exit_code != 0)

    def _on_save(self, iteration: int) -> None:
        for hook in self._hooks:
            hook.on_save(iteration)
        barrier(self.run.device)  # otherwise the next step of other ranks would include rank 0's hooks
