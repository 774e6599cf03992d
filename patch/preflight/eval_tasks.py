"""Tasks of --eval-tasks-path: YAML files in lm-evaluation-harness's format, read without running their code.

lm-eval runs the code that a task's `!function` names, loads metrics and data sets that may be programs, and
reads prompts of other libraries. Here a task may only have keys and values that run nothing; other keys are
refused by name. lm-eval gets the tasks as read here, so it opens no YAML of the folder itself.
Data files are searched beside the task. A hub data set is searched in the folder of its name, in the layout
of its download, so that lm-eval's own tasks read it too (`ceval-valid`, `cmmlu`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from glob import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from patch.config.positions import refuse
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError, nearest, shown
from patch.storage.text_files import parse_yaml, read_small

_FIELD = "eval_tasks_path"
_FORMATS = ("json", "csv", "parquet", "text")
"""Hugging Face's readers that cannot unpickle and read files only."""
_READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_KEYS = {
    "task": frozenset(
        "task task_alias tag group group_alias aggregate_metric_list include dataset_path dataset_name "
        "dataset_kwargs training_split validation_split test_split fewshot_split fewshot_config "
        "num_fewshot output_type doc_to_text doc_to_target doc_to_choice description target_delimiter "
        "fewshot_delimiter metric_list generation_kwargs repeats filter_list gen_prefix metadata".split()
    ),
    "dataset_kwargs": frozenset("data_files field delimiter column_names".split()),
    "metric_list": frozenset(
        "metric aggregation higher_is_better ignore_case ignore_punctuation ignore_numbers "
        "regexes_to_ignore".split()
    ),
}
"""Keys that a task, its data and each of its metrics may have."""
_TEXTS = (str, list)
_TYPES: dict[str, type | tuple[type, ...]] = {
    "task": _TEXTS, "group": str, "tag": _TEXTS, "include": _TEXTS, "metric_list": list, "metric": str,
    "dataset_path": str, "dataset_name": str, "dataset_kwargs": dict, "data_files": (str, list, dict),
    "training_split": str, "validation_split": str, "test_split": str, "fewshot_split": str,
}  # fmt: skip
"""Types of the values that are read here; lm-eval checks the other values when it builds the task."""
_METRICS = (
    "acc", "acc_norm", "acc_bytes", "acc_mutual_info", "brier_score", "exact_match", "f1", "mcc", "bleu",
    "perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "chrf", "ter",
)  # fmt: skip
"""lm-eval's own metrics; it would search the hub for other metrics, and run them."""


def tasks_are_there(config: RunConfig, machine: MachineFacts) -> None:
    """Require lm-eval, and the named tasks in the folder, which runs no code."""
    data = config.data
    if data.eval_tasks is None:
        return
    if find_spec("lm_eval") is None:
        why = "it is not installed: pip install 'llama-megatron-patch[tasks]', or lm-eval==0.4.13"
        refuse("eval_tasks", data.eval_tasks, "none, or lm-evaluation-harness beside this package", why)
    if not data.tasks:
        refuse("eval_tasks", repr(data.eval_tasks), "names: a,b,c", "there is none in it")
    if data.eval_tasks_path is None:
        return
    if not Path(data.eval_tasks_path).is_dir():
        refuse(_FIELD, data.eval_tasks_path, "a folder of YAML files", "there is no such folder")
    if data.eval_tasks_allow_code:
        return
    names = _names(read_tasks(Path(data.eval_tasks_path), data.tasks).values())
    for name in data.tasks:
        if name not in names:
            why = f"{data.eval_tasks_path} has none of that name{nearest(name, sorted(names))}"
            refuse("eval_tasks", name, "names of tasks, groups or tags", why)


def read_tasks(folder: Path, names: Sequence[str] = ()) -> dict[Path, dict[str, Any]]:
    """Return the tasks and groups of a folder, by file: everything that lm-eval may be given.

    Args:
        names: tasks; if the folder lacks a task, it is searched among lm-eval's own.
    Raises:
        ConfigError: a task could run code, needs the network, or cannot be read.
    """
    found = _read_all(folder)
    for name in sorted({*names} - _names(found.values())):
        found |= _of_lm_eval(name)
    for file, task in found.items():
        if task.get("dataset_path") not in (None, *_FORMATS):
            _read_from_folder(task, folder, file)
    return found


def _read_all(folder: Path) -> dict[Path, dict[str, Any]]:
    found = {}
    for file in sorted(folder.rglob("*.yaml")):
        task = _read(file, folder.resolve(), ())
        if "task" not in task and "group" not in task:
            raise _refusal(file, "no `task:` and no `group:`", "the name of a task or a group")
        found[file] = task
    return found


def _of_lm_eval(name: str) -> dict[Path, dict[str, Any]]:
    """Return a task or group of lm-eval's own, with its members. Its folder's name begins the task's name."""
    package = find_spec("lm_eval")
    assert package is not None and package.origin is not None, "tasks_are_there has found it"
    folders = [path for path in Path(package.origin).parent.glob("tasks/*/") if name.startswith(path.name)]
    found = _read_all(max(folders, key=lambda path: len(path.name))) if folders else {}
    wanted, names = {}, [name]
    for each in names:  # `names` grows in the loop
        for file, task in found.items():
            if each in _names([task]):
                wanted[file] = task
                names += [member for member in task["task"] if "group" in task and isinstance(member, str)]
    return wanted


def _read_from_folder(task: dict[str, Any], folder: Path, file: Path) -> None:
    """Make a task read its data set's files from the folder, in one of the hub's file layouts."""
    path, name = escape(task["dataset_path"]), escape(task.pop("dataset_name", None) or "")
    files = dict[str, list[str]]()
    for split in {escape(value) for key, value in task.items() if key.endswith("_split") and value}:
        of_name = (f"{path}/{split}/{name}.*", f"{path}/{split}/{name}_{split}.*") if name else ()
        forms = (*of_name, f"{path}/{name}/{split}[-.]*")
        found = [each for form in forms for each in sorted(folder.glob(form.lstrip("/"))) if "\0" not in form]
        found = [each.resolve() for each in found if each.suffix in _READERS and _inside(each, folder)]
        if not found:
            expected = f"one of {', '.join(_FORMATS)}, or files there: {' or '.join(forms)}"
            raise _refusal(file, f"dataset_path {path} without {split} in {folder / path}", expected)
        files[split] = [*map(str, found)]
        task["dataset_path"] = _READERS[found[0].suffix]
    task["dataset_kwargs"] = (task.get("dataset_kwargs") or {}) | {"data_files": files}


def _names(tasks: Iterable[Mapping[str, Any]]) -> set[str]:
    names = set()
    for task in tasks:
        tags = task.get("tag") or []
        names |= {str(task.get("group") or task["task"]), *([tags] if isinstance(tags, str) else tags)}
    return names


def _read(file: Path, root: Path, before: tuple[Path, ...]) -> dict[str, Any]:
    """Return a file's keys, merged over the keys of the files that it includes."""
    if not _inside(file, root):
        raise _refusal(file, "a file outside of the folder", "files in it only")
    if file in before:
        raise _refusal(file, "a file that includes itself", "an end of its includes")
    try:
        own = parse_yaml(read_small(file).decode())
    except (OSError, ValueError) as error:
        cure = "YAML without tags (--eval-tasks-allow-code: !function runs)"
        raise _refusal(file, str(error), cure) from error
    if not isinstance(own, dict):
        raise _refusal(file, type(own).__name__, "keys with values")
    _check(own, file, root)
    includes = own.pop("include", None) or []
    merged: dict[str, Any] = {}
    for name in [includes] if isinstance(includes, str) else includes:
        merged |= _read(file.parent / str(name), root, (*before, file))
    return merged | own


def _check(task: dict[str, Any], file: Path, root: Path) -> None:
    """Refuse keys that could run code, need the network or be misread; make data file paths absolute."""
    _check_keys(task, "task", file)
    options = task.get("dataset_kwargs") or {}
    _check_keys(options, "dataset_kwargs", file)
    if "data_files" in options:
        options["data_files"] = _whole_paths(options["data_files"], file, root)
    for metric in task.get("metric_list") or ():
        _check_keys(metric, "metric_list", file)
        if metric.get("metric") not in _METRICS:
            raise _refusal(file, f"metric {metric.get('metric')}", f"one of {', '.join(_METRICS)}")
    members = task.get("task")
    for member in members if isinstance(members, list) else ():
        if not isinstance(member, str):
            _check(member, file, root)


def _check_keys(values: Any, kind: str, file: Path) -> None:
    known = _KEYS[kind]
    for key in values if isinstance(values, dict) else [repr(values)]:
        if key not in known:
            what = f"{key!r} in a {kind}" if kind == "task" else f"{key!r} in {kind}"
            raise _refusal(file, f"{what}{nearest(str(key), sorted(known))}", "keys that run no code")
        value, names = values[key], values[key] if key in ("tag", "include") else ()
        is_wrong = value is not None and not isinstance(value, _TYPES.get(key, object))
        if is_wrong or not all(isinstance(name, str) for name in names or ()):
            raise _refusal(file, f"{shown(value)} at {key}", "the type that lm-eval's guide says")


def _whole_paths(files: Any, task: Path, root: Path) -> Any:
    """Return the absolute paths of data files beside the task: one name, several, or several per split."""
    if isinstance(files, dict):
        return {str(split): _whole_paths(own, task, root) for split, own in files.items()}
    if isinstance(files, list):
        return [_whole_paths(file, task, root) for file in files]
    path = task.parent / str(files)
    if "::" in str(files) or not path.is_file() or not _inside(path, root):
        raise _refusal(task, f"data_files {shown(str(files)).strip(chr(39))}", f"a file in {root}")
    return str(path.resolve())


def _inside(file: Path, folder: Path) -> bool:
    try:
        return file.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle, a name with NUL
        return False


def _refusal(file: Path, got: str, expected: str) -> ConfigError:
    trust = "--eval-tasks-allow-code trusts the folder"
    return ConfigError(f"{file}: got {got}, expected {expected}; {trust}", field=_FIELD)
