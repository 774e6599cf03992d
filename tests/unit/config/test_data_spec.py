"""Positions 20 and 21: one set or several, weights, files, folders and globs."""

import json
import os
from pathlib import Path

import pytest

from patch.config.data_spec import DataPart, files_of, format_data, parse_columns, parse_data
from patch.errors import DataError


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


def tree(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def test_folder_gives_its_data_files_sorted(tmp_path: Path):
    names = ("b.jsonl", "a.json.gz", "below/c.PARQUET", "below/d.jsonl.zst")
    others = ("README.md", ".git/x.json", ".hidden.json", "_SUCCESS", "_temporary/part.json", "x.txt")
    folder = tree(tmp_path, *names, *others)
    assert files_of(str(folder)) == sorted(folder / name for name in names)


def test_what_describes_a_set_is_none_of_its_files(tmp_path: Path):
    """A folder of `save_to_disk` that was loaded and filtered, one of several sets, and one of the hub."""
    names = ("data-0.arrow", "below/data-0.arrow")
    others = ("state.json", "dataset_info.json", "cache-1f.arrow", "dataset_dict.json", "dataset_infos.json")
    folder = tree(tmp_path / "saved", *names, *others, "below/state.json", "about.csv")
    assert files_of(str(folder)) == sorted(folder / name for name in names)
    assert [file.name for file in files_of(str(tree(tmp_path / "states", "state.json", "city.json")))] == [
        "city.json",
        "state.json",
    ]


def test_tables_are_taken_where_nothing_else_has_rows(tmp_path: Path):
    folder = tree(tmp_path, "a.csv", "b.TSV")
    assert files_of(str(folder)) == [folder / "a.csv", folder / "b.TSV"]
    assert files_of(str(tree(folder, "c.json"))) == [folder / "c.json"]


def test_a_saved_set_that_lacks_a_file_is_refused(tmp_path: Path):
    folder = tree(tmp_path, "data-00000-of-00002.arrow")
    listed = [{"filename": f"data-0000{index}-of-00002.arrow"} for index in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": listed}))
    with pytest.raises(DataError, match="data-00001-of-00002.arrow is missing, which state.json .* lists"):
        files_of(str(folder))


TABLE = {
    "identity": {"file_name": "identity.json"},
    "tools": {"file_name": "my tools.json", "formatting": "sharegpt", "columns": {"messages": "dialog"}},
    "qa": {"hf_hub_url": "acme/qa", "columns": {"prompt": "question", "response": "answer", "system": ""}},
    "web": {"file_name": "web.jsonl", "columns": {"prompt": "content"}},
    "seen": {"file_name": "seen.json", "columns": {"messages": "messages", "images": "images"}},
    "pairs": {"file_name": "pairs.json", "ranking": True},
    "elsewhere": {"ms_hub_url": "acme/qa"},
    "spoken": {
        "file_name": "spoken.json",
        "columns": {"messages": "messages"},
        "tags": {"role_tag": "speaker", "content_tag": "content", "user_tag": "user"},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["", "/dataset_info.json", "/.."])
def test_llama_factorys_table_names_its_sets_as_they_are_given_here(tmp_path: Path, name: str):
    tmp_path = tmp_path / "data"
    tmp_path.mkdir()
    (tmp_path / "dataset_info.json").write_text(json.dumps(TABLE))
    tree(tmp_path, "identity.json", "my tools.json")
    with pytest.raises(DataError) as caught:
        files_of(os.path.normpath(f"{tmp_path}{name}"), "train_data_path")
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
        ((), "is a folder without data: it is empty; expected files that end in .json"),
        (("a.txt", "below/b.xlsx"), "is a folder without data: it has a.txt, b.xlsx; expected"),
        (("train.json", "test.json"), r"holds several splits: training \(train.json\), test \(test.json\)"),
        (("data/train-0.parquet", "data/validation-0.parquet"), "holds several splits: .*validation"),
        (("train-0.json", "dev/a.json"), r"expected the files of one, .* such as '.*/\*\*/\*train\*'"),
        (("a/train/0.arrow", "a/train/state.json", "a/test/0.arrow"), "one, .* such as '[^*]*/a/train'"),
    ],
)
def test_folder_that_is_not_one_set_is_refused(tmp_path: Path, names, said):
    with pytest.raises(DataError, match=said) as caught:
        files_of(str(tree(tmp_path, *names)), "train_data_path")
    assert caught.value.field == "train_data_path"


def test_one_split_and_words_like_splits_are_taken(tmp_path: Path):
    folder = tree(tmp_path, "train-0.json", "train-1.json", "latest.json", "contest.json", "devices.json")
    assert len(files_of(str(folder))) == 5


def test_misspelled_file_names_the_one_beside_it(tmp_path):
    (tmp_path / "alpaca_zh_demo.json").touch()
    with pytest.raises(DataError, match=r"dmo.json does not exist, did you mean alpaca_zh_demo.json\?"):
        files_of(str(tmp_path / "alpaca_zh_dmo.json"))


def test_prefix_that_lacks_its_end_names_the_set(tmp_path):
    for name in ("docsA_text_document.bin", "docsA_text_document.idx", "docsB_text_document.idx"):
        (tmp_path / name).touch()
    with pytest.raises(DataError, match=rf"exist, did you mean {tmp_path}/docsA_text_document\?"):
        files_of(str(tmp_path / "docsA"))
    with pytest.raises(DataError, match="docsB does not exist, expected"):  # it has no .bin
        files_of(str(tmp_path / "docsB"))
