"""The tasks of lm-evaluation-harness, read once per run, and the scores of a model.

Imports lm_eval, which takes a second, and `datasets`, which is set to offline mode.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import copy
from io import StringIO
from pathlib import Path
from unittest import mock

import datasets
import huggingface_hub
import lm_eval
from lm_eval import utils
from lm_eval.tasks import TaskManager
from lm_eval.tasks._index import Entry, TaskIndex
from transformers import PreTrainedTokenizerBase

from patch.config.schema import DataConfig
from patch.data.chat_templates import ensure_chat_template
from patch.errors import ConfigError, nearest
from patch.preflight.eval_tasks import read_tasks
from patch.training.tasks.live_model import LiveModel
from patch.training.tasks.scoring import Answer, Question
from patch.training.tasks.templates import Templates

_SEED = 1234
"""lm-eval's default seed of the few-shot examples."""
_BOOTSTRAPS = 1000
"""Bootstrap samples for scores whose standard error has no formula."""


class Tasks:
    """The tasks of --eval-tasks with their documents; `max_length`: the model's longest sequence."""

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, max_length: int) -> None:
        self._data, self._max_length = data, max_length
        self._tokenizer = copy(tokenizer)  # the run exports the original unchanged
        if data.eval_tasks_apply_chat_template:
            ensure_chat_template(self._tokenizer, data.chat_template, data.chat_template_kwargs)
            if self._tokenizer.chat_template is None:
                lack = f"the tokenizer {tokenizer.name_or_path} has no chat template, expected one"
                raise ConfigError(f"{lack}: --chat-template", field="eval_tasks_apply_chat_template")
        self._templates = Templates(self._tokenizer)
        with self._surroundings():
            self._loaded = _manager(data).load(data.tasks)
            for task in self._loaded["tasks"].values():
                own = task.get_config("num_fewshot")
                if own is None or (own and data.eval_tasks_num_fewshot is not None):
                    task.set_config(key="num_fewshot", value=data.eval_tasks_num_fewshot or 0)

    def is_higher_better(self, name: str) -> bool:
        """Return whether a higher score TASK/METRIC is better, by lm-eval's definition.

        Raises:
            ConfigError: the tasks have no such score.
        """
        owners = [(owner, task, {*task.higher_is_better()}) for owner, task in self._loaded["tasks"].items()]
        for owner, group in self._loaded["groups"].items():
            shown = {each.metric for each in group.aggregate_metric_list or ()}
            owners += [(owner, task, shown) for task in group.get_all_tasks()]
        known: dict[str, bool] = {
            _score(owner, f"{metric},{each.name}"): is_higher
            for owner, task, shown in owners
            for metric, is_higher in task.higher_is_better().items()
            for each in task._filters
            if metric in shown and is_higher is not None
        }
        if name not in known:
            lack = f"got {name}, expected one of {', '.join(known)}{nearest(name, list(known))}"
            raise ConfigError(lack, field="metric_for_best_model")
        return known[name]

    def scores(self, ask: Callable[[Sequence[Question]], list[Answer]]) -> dict[str, float]:
        """Return the scores, `tasks/TASK/METRIC`, and their standard errors, `tasks/TASK/METRIC_stderr`."""
        data, model = self._data, LiveModel(self._tokenizer, self._max_length, ask, self._templates.chat)
        for task in self._loaded["tasks"].values():
            task.set_fewshot_seed(seed=_SEED)  # the same examples in every evaluation
        with self._surroundings():
            found = lm_eval.evaluate(
                model, self._loaded, limit=data.eval_tasks_limit,
                bootstrap_iters=_BOOTSTRAPS, log_samples=False,
                system_instruction=data.eval_tasks_system_instruction,
                apply_chat_template=data.eval_tasks_apply_chat_template,
                fewshot_as_multiturn=data.eval_tasks_fewshot_as_multiturn,
            )  # fmt: skip
        assert found is not None, "it is rank 0 of 1"
        return {
            f"tasks/{_score(task, metric)}": float(value)
            for task, values in found["results"].items()
            for metric, value in values.items()
            if "," in metric and isinstance(value, int | float)
        }

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Context with sandboxed templates and without network, progress bars and lm-eval's processes."""
        offline = mock.patch.multiple(datasets.config, HF_HUB_OFFLINE=True, HF_DATASETS_OFFLINE=True)
        hub = mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        alone = mock.patch.dict(os.environ, DISABLE_MULTIPROC="1", LOCAL_RANK="0")
        ours = mock.patch.object(utils, "apply_template", self._templates.render)
        with ours, offline, hub, alone, redirect_stderr(StringIO()):
            with redirect_stdout(StringIO()):
                yield


def _score(task: str, metric: str) -> str:
    """Return TASK/METRIC for lm-eval's `METRIC,FILTER`; drop the filter `none`, put `_stderr` at the end."""
    name, _, kind = metric.removesuffix(",none").partition(",")
    score = name.removesuffix("_stderr")
    return f"{task}/{score}{kind and f',{kind}'}{name.removeprefix(score)}"


def _manager(data: DataConfig) -> TaskManager:
    """Return lm-eval's built-in index of tasks, or an index of the user's checked task folder."""
    if data.eval_tasks_path is None:
        return TaskManager()
    if data.eval_tasks_allow_code:
        return TaskManager(include_path=data.eval_tasks_path, include_defaults=False)
    manager, index = TaskManager(include_defaults=False), dict[str, Entry]()
    for file, task in read_tasks(Path(data.eval_tasks_path), data.tasks).items():
        TaskIndex.process_cfg(task, file, index)
    for entry in index.values():
        entry.yaml_path = None  # otherwise lm-eval reads the file again, unchecked
    manager.task_index.update(index)
    return manager
