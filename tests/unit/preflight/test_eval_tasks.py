"""A folder of tasks is read as lm-eval reads it, and what would run code or ask the network is refused."""

import os
import re
from pathlib import Path

import pytest
import yaml
from refusals import refused

from patch.errors import ConfigError
from patch.preflight.eval_tasks import read_tasks

GOOD = {
    "task": "good", "tag": ["few", "all"], "dataset_path": "json", "test_split": "test",
    "dataset_kwargs": {"data_files": {"test": "rows.json"}}, "output_type": "multiple_choice",
    "doc_to_text": "{{question}}", "doc_to_choice": ["a", "b"], "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
BAD = {
    "a function": ("doc_to_text: !function utils.text", "could not determine a constructor for the tag"),
    "a function, included": ("include: _hidden", "could not determine a constructor for the tag"),
    "Python's own tag": ("doc_to_text: !!python/name:os.system ''", "could not determine a constructor"),
    "a class": ("class: x", "'class' in a task"),
    "rows by a function": ("process_docs: x", "'process_docs' in a task"),
    "results by a function": ("process_results: x", "'process_results' in a task"),
    "a set by a function": ("custom_dataset: x", "'custom_dataset' in a task"),
    "another library's prompt": ("use_prompt: 'promptsource:*'", "'use_prompt' in a task"),
    "unsafe code": ("unsafe_code: true", "'unsafe_code' in a task"),
    "a reader that unpickles": ("dataset_path: pandas", "dataset_path pandas without test"),
    "a set of the hub": ("dataset_path: org/set", "dataset_path org/set"),
    "a URL": ("dataset_kwargs: {data_files: 'https://a/b.json'}", "data_files https://a/b.json"),
    "an archive": ("dataset_kwargs: {data_files: 'zip://x::rows.json'}", "data_files zip://x::rows.json"),
    "code of the hub": ("dataset_kwargs: {trust_remote_code: true}", "'trust_remote_code' in dataset_kwargs"),
    "a metric of the hub": ("metric_list: [{metric: ./evil.py}]", "metric ./evil.py, expected one of acc"),
    "its metric, by a key": ("metric_list: [{metric: acc, hf_evaluate: true}]", "'hf_evaluate' in metric_l"),
    "a member": ("task: [{task: x, process_docs: y}]", "'process_docs' in a task"),
    "a file outside": ("include: ../outside.yaml", "a file outside of the folder"),
    "a row outside": ("dataset_kwargs: {data_files: ../outside.yaml}", "data_files ../outside.yaml"),
    "a row elsewhere": ("dataset_kwargs: {data_files: /etc/passwd}", "data_files /etc/passwd"),
    "a row with NUL": ('dataset_kwargs: {data_files: "a\\0b"}', "data_files a\\x00b, expected a file in"),
    "a pipe of rows": ("dataset_kwargs: {data_files: pipe}", "data_files pipe, expected a file in"),
    "a pipe": ("include: pipe", "expected YAML"),
    "NUL": ('include: "a\\0b"', "a file outside of the folder"),
    "a pattern": ("dataset_path: a**", "dataset_path a[*][*] without test"),
    "NUL in a set": ('dataset_path: "a\\0b"', "without test"),
    "itself": ("include: bad.yaml", "a file that includes itself"),
}

WRONG = [
    "include: 3", "include: [3]", "tag: [[1]]", "tag: 3", "group: [1]", "metric_list: 3", "test_split: [a]",
    "metric_list: [{metric: [1]}]", "dataset_path: [a]", "dataset_name: {a: b}", "dataset_kwargs: 3",
]  # fmt: skip
BAD |= {line: (line, ", expected the type that lm-eval's guide says") for line in WRONG}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "rows.json").write_text("{}")
    os.mkfifo(folder / "pipe")
    (folder / "_hidden").write_text("doc_to_text: !function utils.text\n")
    (tmp_path / "outside.yaml").write_text("task: outside\n")
    return folder


def test_a_task_keeps_what_it_says_and_its_data_is_beside_it(folder: Path) -> None:
    (folder / "good.yaml").write_text(yaml.safe_dump({**GOOD, "include": "_common"}))
    (folder / "_common").write_text("num_fewshot: 2\ntag: other\n")
    ((file, found),) = read_tasks(folder).items()
    files = {"data_files": {"test": str(folder / "rows.json")}}
    expected = {**GOOD, "num_fewshot": 2, "dataset_kwargs": files}
    assert file.name == "good.yaml" and found == expected


@pytest.mark.parametrize("file", ["test/x.csv", "test/x_test.json", "x/test-00000-of-00001.parquet"])
def test_a_set_of_the_hub_is_read_from_files_as_they_are_downloaded(folder: Path, file: str) -> None:
    own = GOOD | {"dataset_path": "org/set", "dataset_name": "x"}
    (folder / "good.yaml").write_text(yaml.safe_dump(own))
    place = folder / "org" / "set" / file
    place.parent.mkdir(parents=True)
    place.touch()
    place.with_suffix(".txt").touch()
    (found,) = read_tasks(folder).values()
    assert found["dataset_path"] == place.suffix[1:] and "dataset_name" not in found
    assert found["dataset_kwargs"] == {"data_files": {"test": [str(place)]}}


@pytest.mark.parametrize("name", BAD)
def test_what_could_run_code_is_refused_by_name(folder: Path, name: str) -> None:
    line, why = BAD[name]
    own = yaml.safe_dump({key: value for key, value in GOOD.items() if not line.startswith(f"{key}:")})
    (folder / "bad.yaml").write_text(f"{own}{line}\n")
    with refused(ConfigError, re.escape(why)):
        read_tasks(folder)
