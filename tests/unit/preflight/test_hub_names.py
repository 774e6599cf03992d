"""org/name at position 22, for the tokenizer and in data positions, from a cache that the test makes."""

import dataclasses
import json
from pathlib import Path

import pytest
from command_line import make_run
from hub_cache import REVISION, add_to_cache
from huggingface_hub import constants
from refusals import refused

from patch.config import RunConfig, to_yaml
from patch.config.data_spec import files_of
from patch.errors import ConfigError, DataError
from patch.preflight.hub_names import fetch_from_hub, fetch_sets
from patch.preflight.validate import validate_run

MODEL = "acme/llama"


@pytest.fixture
def cache(command, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a model without its weights: what a dry run leaves."""
    folder = command.folder / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    config = (Path(command.hf_folder()) / "config.json").read_bytes()
    add_to_cache(folder, MODEL, {"config.json": config, "tokenizer.json": b"{}"})
    return folder


def snapshot(cache: Path, name: str = MODEL, kind: str = "model") -> Path:
    return cache / f"{kind}s--{name.replace('/', '--')}" / "snapshots" / REVISION


def add_set(cache: Path, name: str, *files: str) -> Path:
    return add_to_cache(cache, name, {file: b'{"text": "T"}\n' for file in files}, kind="dataset")


def named(command) -> RunConfig:
    del command.environ["TOKENIZER_PATH"]
    return command.parse(MODEL_SIZE="auto", PRETRAIN_CHECKPOINT_PATH=MODEL).config


def test_a_run_is_planned_without_weights(command, cache: Path) -> None:
    config = named(command)
    assert config.checkpoint.load == config.tokenizer_folder == str(snapshot(cache))
    assert config.model.num_layers == 2
    validate_run(config, command.machine)
    assert fetch_from_hub(config, weights=False) == config
    with refused(ConfigError, r"^--load \(position 22 .*: acme/llama has no weights as safetensors in /"):
        fetch_from_hub(config, weights=True)
    run = make_run(Path(config.checkpoint.output_path), "")  # a run that resumes needs no first weights
    (run / "config.yaml").unlink()
    assert fetch_from_hub(config, weights=True) == config


def test_weights_as_pickles_in_a_local_snapshot_are_left_to_their_reader(command, cache: Path) -> None:
    add_to_cache(cache, MODEL, {"pytorch_model.bin": b"1"})
    config = named(command)
    assert fetch_from_hub(config, weights=True) == config


def test_all_weights_of_the_index_are_needed(command, cache: Path) -> None:
    weights = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    index = {"model.safetensors.index.json": json.dumps(weights).encode(), "model-1.safetensors": b"1"}
    add_to_cache(cache, MODEL, index)
    config = named(command)
    with refused(ConfigError, "HF_HUB_OFFLINE forbids"):
        fetch_from_hub(config, weights=True)
    add_to_cache(cache, MODEL, {"model-2.safetensors": b"2"})
    assert fetch_from_hub(config, weights=True) == config


def test_tokenizer_has_a_name(command, cache: Path) -> None:
    command.environ["TOKENIZER_PATH"] = MODEL
    assert command.parse().config.data.tokenizer_name_or_path == str(snapshot(cache))
    add_to_cache(cache, "acme/bare", {"config.json": b"{}"})
    command.environ["TOKENIZER_PATH"] = "acme/bare"
    with refused(
        ConfigError, r"^--tokenizer-name-or-path .*: acme/bare has no tokenizer.json or tokenizer.mod"
    ):
        command.parse()


def test_a_run_keeps_the_revision_that_it_began_with(command, cache: Path) -> None:
    rows = add_set(cache, "acme/rows", "rows.jsonl")
    names = {"PRETRAIN_CHECKPOINT_PATH": MODEL, "DATASET_PATH": "acme/rows"}
    first = fetch_from_hub(command.parse(**names).config, weights=False)
    assert first.data.train_data_path == str(rows / "rows.jsonl")
    output = Path(first.checkpoint.output_path)
    output.mkdir()
    (output / "config.yaml").write_text(to_yaml(first))
    add_to_cache(cache, MODEL, {"config.json": b"{}"}, revision="f" * 40)
    add_to_cache(cache, "acme/rows", {"rows.jsonl": b""}, kind="dataset", revision="f" * 40)
    again = command.parse(**names).config
    assert fetch_from_hub(again, weights=False) == first


def test_a_config_file_of_another_machine_finds_its_revision(command, cache: Path) -> None:
    add_set(cache, "acme/rows", "rows.jsonl")
    elsewhere = f"/elsewhere/hub/datasets--acme--rows/snapshots/{REVISION}/rows.jsonl"
    model = f"/elsewhere/hub/models--acme--llama/snapshots/{REVISION}"
    config = command.parse(PRETRAIN_CHECKPOINT_PATH=model, DATASET_PATH=elsewhere).config
    config = fetch_from_hub(config, weights=False)
    assert config.checkpoint.load == str(snapshot(cache))
    assert config.data.train_data_path == str(snapshot(cache, "acme/rows", "dataset") / "rows.jsonl")


@pytest.mark.parametrize(
    ("files", "train", "valid"),
    [
        (["rows.json"], "rows.json", "rows.json"),
        (["data/train.jsonl", "data/test.jsonl"], "data/train.jsonl", "data/test.jsonl"),
        (["a/part-0.jsonl.gz", "a/part-1.jsonl.gz", "a/dataset_infos.json"], "a/part*", "a/part*"),
        (
            ["train-00000-of-00002-0123456789abcdef.parquet", "train-00001-of-00002-0123456789abcdef.parquet",
             "validation-00000-of-00001.parquet", "test-00000-of-00001.parquet"],
            "train*", "validation-00000-of-00001.parquet",
        ),
        (["train/0.json", "train/1.json", "dev/0.json"], "train/*", "dev/0.json"),
    ],
)  # fmt: skip
def test_each_data_position_takes_its_split(cache: Path, files: list, train: str, valid: str) -> None:
    folder = add_set(cache, "acme/rows", *files)
    assert fetch_sets("acme/rows", "train_data_path") == f"{folder}/{train}"
    assert fetch_sets("acme/rows", "valid_data_path") == f"{folder}/{valid}"


def test_names_are_parts_of_a_blend(command, cache: Path) -> None:
    add_set(cache, "acme/rows", "rows.json")
    config = command.parse(DATASET_PATH=f"0.7 acme/rows 0.3 {command.data}").config
    rows = snapshot(cache, "acme/rows", "dataset") / "rows.json"
    blend = fetch_sets(config.data.train_data_path, "train_data_path")
    assert blend == f"0.7 {rows} 0.3 {command.data}"


def test_several_sets_of_one_split_are_refused_by_name(cache: Path) -> None:
    folder = add_set(cache, "acme/two", "main/train.json", "main/test.json", "socratic/train.json")
    with refused(DataError, "holds several sets: main/test.json, main/train.json, socratic") as caught:
        fetch_sets("acme/two", "train_data_path")
    assert f"such as '{folder}/main/train.json'" in str(caught.value)
    with refused(DataError, "^--valid-data-path .*acme/only holds no validation or test set: train.json;"):
        add_set(cache, "acme/only", "train.json")
        fetch_sets("acme/only", "valid_data_path")


def test_a_prefix_of_indexed_data_is_no_name(command, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.chdir(command.folder)
    command.environ["MP_DATASET_TYPE"] = "idxmap"
    steps = {"TRAIN_TOKENS_OR_ITERS": "1e5", "WARMUP_TOKENS_OR_ITERS": "0"}
    config = command.parse(SFT="false", DATASET_PATH="data/text_document", **steps).config
    assert config.data.train_data_path == str(command.folder / "data" / "text_document")
    assert fetch_from_hub(config, weights=True) == dataclasses.replace(config)


def test_a_path_into_a_folder_that_is_here_is_no_name(command, monkeypatch) -> None:
    monkeypatch.chdir(command.folder)
    (command.folder / "output").mkdir()
    (command.folder / "output" / "seed_models").mkdir()
    message = "got 'output/seed_model', no such folder: because output is a folder here, .* seed_models[?];"
    for size in ("auto", "tiny"):
        with refused(ConfigError, message):
            command.parse(MODEL_SIZE=size, PRETRAIN_CHECKPOINT_PATH="output/seed_model")
    command.environ["TOKENIZER_PATH"] = "output/other"
    with refused(ConfigError, "^--tokenizer-name-or-path .*got 'output/other', no such folder: because "):
        command.parse()
    with pytest.raises(DataError, match=r"output/rows does not exist \(a name of the hub is found where no"):
        files_of("output/rows")
