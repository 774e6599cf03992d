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
BAD = Path(__file__).with_name("bad_tasks.txt").read_text().splitlines()[1:]


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


def test_what_could_run_code_is_refused_by_name(folder: Path) -> None:
    for row in BAD:
        line, _, why = row.partition(" => ")
        own = {key: value for key, value in GOOD.items() if not line.startswith(f"{key}:")}
        (folder / "bad.yaml").write_text(f"{yaml.safe_dump(own)}{line}\n")
        with refused(ConfigError, re.escape(why)):
            read_tasks(folder)
