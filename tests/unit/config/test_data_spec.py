"""Positions 20 and 21: one set or several, weights, files, folders and globs."""

import json
import os
import shutil
from pathlib import Path

import pytest

from patch.config.data_spec import DataPart, files_of, format_data, parse_columns, parse_data
from patch.errors import DataError, about


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("a.json", [(None, "a.json")]),
        ("0.7 a.json 0.3 b.jsonl", [(0.7, "a.json"), (0.3, "b.jsonl")]),
        ("30 a 1e1 b", [(30, "a"), (10, "b")]),
        ("a.json  b.jsonl\tc", [(None, "a.json"), (None, "b.jsonl"), (None, "c")]),
        ("1 'my data/a.json' 2 \"b's.json\"", [(1, "my data/a.json"), (2, "b's.json")]),
        ("./7 a", [(None, "./7"), (None, "a")]),
        ("1 data\\rows#1.json 2 *.json", [(1, "data\\rows#1.json"), (2, "*.json")]),
    ],
)
def test_sets_are_read_and_written_back(text, parts):
    found = parse_data(text)
    assert [tuple(part) for part in found] == parts
    assert parse_data(format_data(found)) == found


@pytest.mark.parametrize(
    "made", ["my rows.json", "0.5 rows.json", "text document.bin", "folder of rows/a.json"]
)
def test_text_that_names_files_as_a_whole_is_one_path(tmp_path: Path, made):
    file = tmp_path / made
    file.parent.mkdir(exist_ok=True)
    file.touch()
    for text in (str(file).removesuffix(".bin"), f"{file.parent}/*"):
        assert parse_data(text) == (DataPart(None, text),)


def test_relative_paths_of_a_blend_become_absolute(command, monkeypatch):
    monkeypatch.chdir(command.folder)
    os.mkdir("my rows")
    config = command.parse(DATASET_PATH="0.25 rows.json 1 'my rows/*.json'").config
    parts = parse_data(config.data.train_data_path)
    assert parts == (
        DataPart(0.25, str(command.data)),
        DataPart(1.0, f"{command.folder}/my rows/*.json"),
    )


def test_the_store_of_a_teacher_is_found_from_any_folder(command, monkeypatch):
    monkeypatch.chdir(command.folder)
    assert command.parse("--distill-from", "store").config.data.distill_from == f"{command.folder}/store"


def tree(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("names", "others"),
    [
        (
            "a.json.gz b.jsonl below/c.PARQUET below/d.jsonl.zst",
            "README.md .git/x.json .hidden.json _SUCCESS _temporary/part.json x.txt",
        ),
        # A folder of `save_to_disk` that was loaded and filtered, one of several sets, and one of the hub.
        (
            "below/data-0.arrow data-0.arrow",
            "state.json dataset_info.json cache-1f.arrow dataset_dict.json dataset_infos.json "
            "below/state.json about.csv",
        ),
        ("city.json state.json", ""),
        ("a.csv b.TSV", ""),
        ("c.json", "a.csv"),  # tables are taken where nothing else has rows
        # One split, and words like splits.
        ("contest.json devices.json latest.json train-0.json train-1.json", ""),
    ],
)
def test_folder_gives_its_data_files_sorted(tmp_path: Path, names, others):
    folder = tree(tmp_path, *names.split(), *others.split())
    assert files_of(str(folder)) == [folder / name for name in names.split()]


def test_a_saved_set_that_lacks_a_file_is_refused(tmp_path: Path):
    folder = tree(tmp_path, "data-00000-of-00002.arrow")
    listed = [{"filename": f"data-0000{index}-of-00002.arrow"} for index in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": listed}))
    with pytest.raises(DataError, match="data-00001-of-00002.arrow is missing, which state.json .* lists"):
        files_of(str(folder))


@pytest.mark.parametrize("name", ["", "/dataset_info.json", "/.."])
def test_llama_factorys_table_names_its_sets_as_they_are_given_here(tmp_path: Path, name: str):
    tmp_path = tmp_path / "data"
    tmp_path.mkdir()
    shutil.copy(Path(__file__).with_name("dataset_info.json"), tmp_path)
    tree(tmp_path, "identity.json", "my tools.json")
    with pytest.raises(DataError) as caught, about("train_data_path"):
        files_of(os.path.normpath(f"{tmp_path}{name}"))
    assert caught.value.field == "train_data_path"
    message, _, sets = str(caught.value).partition(" to train on: ")
    assert message == (
        f"{tmp_path}/dataset_info.json is LLaMA-Factory's table of 8 sets, not rows; expected the file of "
        "one, or 'FILE FILE' of several. Those of text"
    )
    assert sets.split("; ") == [
        f"identity: {tmp_path}/identity.json",
        f"tools: '{tmp_path}/my tools.json' --columns messages=dialog",
        "qa: acme/qa --columns instruction=question,output=answer",
        f"web: {tmp_path}/web.jsonl --columns text=content",
        f"spoken: {tmp_path}/spoken.json --columns role=speaker",
    ]
    for each in sets.split("; "):
        assert parse_columns(each.partition(" --columns ")[2] or None) is not None


def test_glob_gives_what_matches(tmp_path: Path):
    folder = tree(tmp_path, "b.txt", "a.txt", "c.json", "below/d.txt", "f.txt/x")
    assert files_of(f"{folder}/*.txt") == [folder / "a.txt", folder / "b.txt"]
    assert files_of(f"{folder}/**/[ad].txt") == [folder / "a.txt", folder / "below" / "d.txt"]
    odd = tree(tmp_path, "rows[1].json") / "rows[1].json"
    assert files_of(str(odd)) == [odd]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("a.txt", "below/b.xlsx"), "is a folder without data: it has a.txt, b.xlsx; expected"),
        (("data/train-0.parquet", "data/validation-0.parquet"), "holds several splits: .*validation"),
        (("train-0.json", "dev/a.json"), r"expected the files of one, .* such as '.*/\*\*/\*train\*'"),
        (("a/train/0.arrow", "a/train/state.json", "a/test/0.arrow"), "one, .* such as '[^*]*/a/train'"),
    ],
)
def test_folder_that_is_not_one_set_is_refused(tmp_path: Path, names, said):
    with pytest.raises(DataError, match=said) as caught, about("train_data_path"):
        files_of(str(tree(tmp_path, *names)))
    assert caught.value.field == "train_data_path"


def test_misspelled_file_or_prefix_names_the_one_beside_it(tmp_path):
    tree(tmp_path, "alpaca_zh_demo.json", "docsB_text_document.idx")
    tree(tmp_path, "docsA_text_document.bin", "docsA_text_document.idx")
    for name, said in (
        ("alpaca_zh_dmo.json", r"dmo.json does not exist, did you mean alpaca_zh_demo.json\?"),
        ("docsA", rf"exist, did you mean {tmp_path}/docsA_text_document\?"),
        ("docsB", "docsB does not exist, expected"),  # it has no .bin
    ):
        with pytest.raises(DataError, match=said):
            files_of(str(tmp_path / name))
