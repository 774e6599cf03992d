"""build_datasets: both kinds of sets, and one rank's error on all ranks."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import pytest
from distributed_runner import run_distributed
from llama3_tokenizer import build_tiny_tokenizer, tiny_tokenizer
from refusals import refused
from small_runs import small_run
from transformers import PreTrainedTokenizerBase

from patch.checks.run_length import num_train_samples
from patch.config.schema import RunConfig
from patch.data import DataSets, SampleSource, build_datasets, load_tokenizer
from patch.errors import DataError


def raw_run(folder: Path, **changes) -> RunConfig:
    answers = {"train": ["world", "again", "you"], "valid": ["there"]}
    paths = {f"{name}_data_path": str(rows_of(folder, f"{name}.json", answers[name])) for name in answers}
    paths["output_path"] = str(folder / "out")
    return small_run(**{**paths, "vocab_size": 400, **changes})


def build(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DataSets:
    return build_datasets(
        config.data, config.model, tokenizer, sft=config.training.sft,
        num_train_samples=partial(num_train_samples, config),
        seed=config.training.seed, index_folder=Path(config.checkpoint.output_path) / "data_index",
    )  # fmt: skip


def test_raw_sets_have_the_padded_length(tmp_path: Path) -> None:
    train, num_samples, valid, *_ = build(raw_run(tmp_path, max_padding_length=24), tiny_tokenizer())
    assert (len(train), num_samples, list(valid), len(valid["valid"])) == (3, 80, ["valid"], 1)
    assert train[0].tokens.shape == (24,)
    assert build(raw_run(tmp_path, valid_data_path="none"), tiny_tokenizer()).valid == {}


@pytest.mark.parametrize("name", ["train", "valid"])
def test_bad_row_is_about_the_position_of_its_file(tmp_path: Path, name: str) -> None:
    config = raw_run(tmp_path)
    (tmp_path / f"{name}.json").write_text('[{"instruction": "a", "output": 5}]')
    with refused(DataError, rf"position 2[01] .*DATASET_PATH\): .*{name}\.json: ") as caught:
        build(config, tiny_tokenizer())
    assert caught.value.field == f"{name}_data_path"


def test_tokenizer_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocabulary has 250 rows"):
        build(raw_run(tmp_path, vocab_size=250), tiny_tokenizer())


def rows_of(folder: Path, name: str, answers: list[str]) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([{"instruction": "hello", "output": answer} for answer in answers]))
    return path


def texts(source: SampleSource, count: int) -> list[str]:
    tokenizer = tiny_tokenizer()
    samples = [source[index] for index in range(count)]
    return [tokenizer.decode(sample.labels[sample.loss_mask > 0].tolist()) for sample in samples]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("spec", ["0.75 {} 0.25 {}", "{} {}", "{}"])
def test_places_of_samples_are_the_rows_that_hold_their_text(
    tmp_path: Path, spec: str, packing: bool
) -> None:
    files = {
        str(rows_of(tmp_path, f"{name}.json", texts)): texts
        for name, texts in (("big", [f"number {index}" for index in range(9)]), ("small", ["yes", "no"]))
    }
    config = raw_run(tmp_path, train_data_path=spec.format(*files), packing=packing, max_padding_length=64)
    tokenizer = tiny_tokenizer()
    train = build(config, tokenizer).train
    for index in range(min(len(train), 12)):
        rows = [place.rpartition(": row ") for place in train.place(index).split(" + ")]
        found = tokenizer.decode(train[index].tokens.tolist())
        assert all(files[file][int(row) - 1] in found for file, _, row in rows)
        assert found.count("hello") == len(rows)


def test_place_after_a_dropped_row_is_that_of_the_sample(tmp_path: Path) -> None:
    rows = [{"instruction": "hello", "output": text} for text in ("one", "", "two")]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    config = raw_run(tmp_path, train_data_path=str(tmp_path / "rows.json"), max_dropped_share=0.5)
    train = build(config, tiny_tokenizer()).train
    assert train.place(1) == f"{tmp_path / 'rows.json'}: sample 2"


def test_epochs_count_the_samples_of_all_training_sets(tmp_path: Path) -> None:
    first = rows_of(tmp_path, "first.json", ["one", "two"])
    second = rows_of(tmp_path, "second.json", ["three", "four", "five"])
    for spec in (f"{first} {second}", f"0.9 {first} 0.1 {second}"):
        config = raw_run(tmp_path, train_data_path=spec, train_epochs=2.0)
        assert build(config, tiny_tokenizer()).num_train_samples == 12  # 10, in whole batches of 4


def test_each_validation_set_has_a_name_of_its_own(tmp_path: Path) -> None:
    parts = ["a.json", "b.v2.json", "x/a.json", "y/part.json"]
    paths = [rows_of(tmp_path, part, ["there"] * (index + 1)) for index, part in enumerate(parts)]
    paths[3] = tmp_path / "y" / "*.json"
    config = raw_run(tmp_path, valid_data_path=" ".join(map(str, paths)))
    valid = build(config, tiny_tokenizer()).valid
    assert {name: len(source) for name, source in valid.items()} == {"a": 1, "b.v2": 2, "a_2": 3, "y": 4}
    weighted = raw_run(tmp_path, valid_data_path=f"3 {paths[0]} 1 {paths[1]}")
    assert build(weighted, tiny_tokenizer()).valid_weights == [3.0, 1.0]


BROKEN = {
    "train.json": "train.json: rank 0 has read 2 samples, rank 1 2, which are not the same",
    "valid.json": "valid.json: rank 0 has read 2 samples, rank 1 2, which are not the same",
    "template": "broken here",
}


def build_on_machines(rank: int, world_size: int, folder: str, config: RunConfig) -> None:
    """Each rank has a disk of its own, under one name; rank 1 has other rows or another template."""
    mine = Path(config.data.train_data_path).with_name(f"disk of {rank}")
    for broken, said in BROKEN.items():
        for name in ("train.json", "valid.json"):
            rows_of(mine, name, ["one", "two three" if rank == 1 and name == broken else "two"])
        paths = {f"{name}_data_path": str(mine / f"{name}.json") for name in ("train", "valid")}
        tokenizer = load_tokenizer(folder)
        if rank == 1 and broken == "template":
            tokenizer.chat_template = "{{ raise_exception('broken here') }}"
        with pytest.raises(DataError, match=said):
            build(dataclasses.replace(config, data=dataclasses.replace(config.data, **paths)), tokenizer)


def test_what_one_rank_cannot_read_or_reads_otherwise_is_refused_on_all(tmp_path: Path) -> None:
    build_tiny_tokenizer(tmp_path / "tok")
    run_distributed(build_on_machines, 2, str(tmp_path / "tok"), raw_run(tmp_path))
