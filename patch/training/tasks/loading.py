"""The tasks that lm-evaluation-harness reads, once for a run, and what it says of a model.

Imports lm_eval, which needs a second, and `datasets`, which is told to ask no network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub
import lm_eval
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, TaskIndex
from transformers import PreTrainedTokenizerBase

from patch.config.schema import DataConfig
from patch.preflight.eval_tasks import read_tasks
from patch.training.tasks.live_model import LiveModel
from patch.training.tasks.scoring import Answer, Question
from patch.training.tasks.templates import Templates

_SEED = 1234
"""lm-eval's own, of the examples before a question."""
_BOOTSTRAPS = 1000
"""Samples for the error of a score that has no formula for it."""


class Tasks:
    """The tasks of --eval-tasks with their documents.

    Args:
        data: names them.
        tokenizer: of the model.
        max_length: tokens of the model's longest sequence.
    """

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self._limit, self._tokenizer, self._max_length = data.eval_tasks_limit, tokenizer, max_length
        self._templates = Templates()
        with self._surroundings():
            self._loaded = _manager(data).load(data.tasks)
            for task in self._loaded["tasks"].values():
                if task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)

    def scores(self, ask: Callable[[Sequence[Question]], list[Answer]]) -> dict[str, float]:
        """The scores of a model, `tasks/TASK/METRIC`, and their errors, `tasks/TASK/METRIC_stderr`.

        Args:
            ask: gives the model's answers.
        """
        model = LiveModel(self._tokenizer, self._max_length, ask)
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=_SEED)  # each evaluation has the same examples
        with self._surroundings():
            found = lm_eval.evaluate(
                model, self._loaded, limit=self._limit, bootstrap_iters=_BOOTSTRAPS, log_samples=False
            )
        assert found is not None, "it is rank 0 of 1"
        return {
            f"tasks/{task}/{metric.removesuffix(',none').replace('_stderr,none', '_stderr')}": float(value)
            for task, values in found["results"].items()
            for metric, value in values.items()
            if "," in metric and isinstance(value, int | float)
        }

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Templates in the sandbox, no network, no progress bars, no processes of lm-eval's own."""
        offline = mock.patch.multiple(datasets.config, HF_HUB_OFFLINE=True, HF_DATASETS_OFFLINE=True)
        hub = mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        alone = mock.patch.dict(os.environ, DISABLE_MULTIPROC="1", LOCAL_RANK="0")
        with self._templates.in_use(), offline, hub, alone, redirect_stderr(StringIO()):
            with redirect_stdout(StringIO()):
                yield


def _manager(data: DataConfig) -> TaskManager:
    """lm-eval's index of tasks: its own, or those of a folder, as they were checked."""
    if data.eval_tasks_path is None:
        return TaskManager()
    if data.eval_tasks_allow_code:
        return TaskManager(include_path=data.eval_tasks_path, include_defaults=False)
    manager, index = TaskManager(include_defaults=False), dict[str, Entry]()
    for file, task in read_tasks(Path(data.eval_tasks_path)).items():
        TaskIndex.process_cfg(task, file, index)
    for entry in index.values():
        entry.yaml_path = None  # else lm-eval reads the file again
    manager.task_index.update(index)
    return manager
