"""Scores of tasks by all ranks of a run, and the hook that computes them during training.

Rank 0 alone has lm-eval, the task folder and the documents. It broadcasts lm-eval's requests to all ranks,
which run the forwards, then the scores. So a failing task fails on all ranks, and no rank waits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from patch import compat
from patch.config.schema import RunConfig
from patch.data import load_tokenizer
from patch.data.order import StepReader
from patch.device import DeviceContext
from patch.distributed.collectives import all_or_none, from_rank_0
from patch.distributed.groups import initialize, shutdown
from patch.errors import DataError, PatchError
from patch.logger import get_logger
from patch.model import build_llama_model
from patch.progress import LineTimer
from patch.training.evaluation import evaluating
from patch.training.hooks.checkpoint_retention import LOWEST_LOSS, Measure
from patch.training.hooks.hook import Record, TrainerHook
from patch.training.objectives.objective import Objective
from patch.training.run_state import unchanged_random_state
from patch.training.setup import Run, RunData, build_run_optimizer, load_start
from patch.training.tasks.scoring import Answer, Question, answers_to

if TYPE_CHECKING:
    from patch.training.tasks.loading import Tasks

_logger = get_logger(__name__)


class TaskScores(TrainerHook):
    """Scores the model before the first step, each `--eval-tasks-interval` steps and after the last step.

    Every rank has this hook.

    Raises:
        PatchError: a task cannot be read; on all ranks.
    """

    at_start = True

    def __init__(self, run: Run) -> None:
        self._run, training = run, run.config.training
        self.interval = run.config.data.eval_tasks_interval or training.train_iters
        self._tasks: list[Tasks] = []
        """The tasks on rank 0; empty on other ranks."""
        self.measure = from_rank_0(lambda: _translate_errors(self._load))
        """The measure of --metric-for-best-model, the same on all ranks."""

    @unchanged_random_state()
    def evaluate(self, iteration: int) -> Record:
        """Return the scores of all tasks and their standard errors (`Tasks.scores`), the same on all ranks.

        Raises:
            PatchError: a task fails; on all ranks.
        """
        run, timer = self._run, LineTimer()
        if dist.get_rank():
            while True:
                received: list[Question] | dict[str, float] = from_rank_0(dict)
                if isinstance(received, dict):
                    return received
                answers_to(run, received)
        is_answering = False

        def ask(questions: Sequence[Question]) -> list[Answer]:
            nonlocal is_answering
            shared = from_rank_0(lambda: list(questions))
            is_answering = True
            answers = answers_to(run, shared)
            is_answering = False
            return answers

        try:
            scores: dict[str, float] = _translate_errors(lambda: self._tasks[0].scores(ask))
        except Exception:
            if is_answering:  # the other ranks wait in the failed forward, not for a broadcast
                raise
            with all_or_none():
                raise
        _logger.info("tasks: %d scores in %.1f s", len(scores), timer.elapsed_s())
        return from_rank_0(lambda: scores)

    def _load(self) -> Measure:
        from patch.training.tasks.loading import Tasks  # it imports lm_eval

        config = self._run.config
        tasks = Tasks(config.data, self._run.tokenizer, config.model.max_position_embeddings)
        self._tasks.append(tasks)
        name = config.checkpoint.metric_for_best_model
        return LOWEST_LOSS if name is None else Measure(f"tasks/{name}", tasks.is_higher_better(name))


def _translate_errors(work: Callable[[], Any]) -> Any:
    """Return the result of lm-eval's work; translate its errors into DataError."""
    try:
        return work()
    except (PatchError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"the tasks cannot be evaluated: {reason:.2000}", field="eval_tasks") from error


def scores_of_weights(config: RunConfig) -> dict[str, float]:
    """Join a job, score the weights at --load, leave the job; return the scores on every rank.

    Raises:
        PatchError: weights, tokenizer or tasks cannot be read; on all ranks.
    """
    run = run_of_weights(config)
    hook = TaskScores(run)
    with evaluating(run):
        scores = hook.evaluate(0)
    shutdown()
    return scores


def run_of_weights(config: RunConfig) -> Run:
    """Join a job, and return the run of the weights at --load, without data, gradients and optimizer states.

    Only layout, precision and weights of `config` matter.

    Raises:
        PatchError: weights or tokenizer cannot be read; on all ranks.
    """
    context = DeviceContext.select(int(os.environ["LOCAL_RANK"]))
    compat.apply(context.is_cuda)
    groups = initialize(config, context)
    stages = build_llama_model(config, groups, context.device)
    for stage in stages:
        stage.requires_grad_(False)
    with all_or_none():
        tokenizer = load_tokenizer(config.tokenizer_folder)
    optimizer = build_run_optimizer(stages, config, groups)
    data = RunData(Objective(config), cast(StepReader, None), {})  # nothing is read
    run = Run(config, context.device, groups, stages, optimizer, data, tokenizer=tokenizer)
    load_start(run)
    return run
