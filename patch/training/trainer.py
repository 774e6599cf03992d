"""The loop: step, report, evaluate, save, and stop in good order when a signal asks for it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from patch.config import to_yaml
from patch.distributed.collectives import barrier, max_over_world
from patch.training.hooks import TrainerHook
from patch.training.metrics import make_record, measure
from patch.training.run_state import save
from patch.training.setup import Run, checkpoint_root
from patch.training.step import evaluate, train_step


class Trainer:
    """Runs the steps that are left of a run.

    Args:
        run: this rank's parts of the run.
        hooks: what this rank calls after a step, an evaluation and a save, in this order; closed at the end.
    """

    def __init__(self, run: Run, hooks: Sequence[TrainerHook]) -> None:
        self.run, self._hooks = run, hooks
        self._noted_signal = 0
        self._stopping_signal = 0
        """The signal all ranks agreed to stop for; 0: none. One rank may note it a step earlier."""
        self._begin = 0.0
        """When the step under way began."""

    def train(self) -> int:
        """Train to the last step or to a signal; the signal's number, or 0.

        Raises:
            TrainingError: the gradients are not finite. CheckpointError: a checkpoint was not written.
        """
        self._begin = time.perf_counter()
        try:
            with self._listening():
                for iteration in range(self.run.start_iteration, self.run.config.training.train_iters):
                    self._step(iteration)
                    if self._stopping_signal:
                        break
        finally:
            for hook in self._hooks:
                hook.close()
        return self._stopping_signal

    def _step(self, iteration: int) -> None:
        config, done = self.run.config, iteration + 1
        is_last = done == config.training.train_iters
        result = train_step(self.run, iteration)
        # From norm to norm: a GPU is still at this step's update, and was at the last one's when it began.
        now = time.perf_counter()
        seconds, self._begin = now - self._begin, now
        for hook in self._hooks:
            hook.on_step(done, seconds)
        worst = self._share(measure(self.run, result, seconds * 1e3))
        if done % config.checkpoint.log_interval == 0 or is_last:
            record = make_record(config, self.run.device, done, result, worst)
            for hook in self._hooks:
                hook.on_log(record)
        interval = config.data.eval_interval
        if self.run.valid_reader is not None and interval and (done % interval == 0 or is_last):
            self._evaluate(done)
            self._begin = time.perf_counter()
        if done % config.checkpoint.save_interval == 0 or is_last or self._stopping_signal:
            self._save(done)
            self._begin = time.perf_counter()

    def _share(self, measured: dict[str, float]) -> dict[str, float]:
        """The worst rank's measures, and the wish to stop, the same on all ranks, in one collective."""
        *worst, number = max_over_world([*measured.values(), self._noted_signal], self.run.device)
        self._stopping_signal = int(number)
        return dict(zip(measured, worst, strict=True))

    def _evaluate(self, done: int) -> None:
        (loss,) = max_over_world([evaluate(self.run)], self.run.device)
        record = {"iteration": done, "valid_loss": loss, "valid_ppl": math.exp(min(loss, 700.0))}
        for hook in self._hooks:
            hook.on_evaluate(record)

    def _save(self, done: int) -> None:
        run = self.run
        save(checkpoint_root(run.config), done, run.stages, run.optimizer, to_yaml(run.config))
        run.optimizer.record_memory("save")
        for hook in self._hooks:
            hook.on_save(done)
        barrier(run.device)  # or the other ranks' next step would seem to last as long as rank 0's drawing

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """While training, SIGINT and SIGTERM are noted and obeyed after the step."""

        def note(number: int, frame: object) -> None:
            self._noted_signal = number

        previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
