"""build_datasets: both kinds of sets, and one rank's error on all ranks."""

import json
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from llama3_tokenizer import build_tiny_tokenizer, tiny_tokenizer
from small_runs import small_run
from transformers import PreTrainedTokenizerBase

from patch.config.schema import RunConfig
from patch.data import BatchReader, DataSets, build_datasets, load_tokenizer
from patch.data.pretraining.preprocess import write_indexed
from patch.errors import DataError


def raw_run(folder: Path, **changes) -> RunConfig:
    for name, answers in (("train", ["world", "again", "you"]), ("valid", ["there"])):
        rows = [{"instruction": "hello", "output": answer} for answer in answers]
        (folder / f"{name}.json").write_text(json.dumps(rows))
    return small_run(
        **(
            dict(
                train_data_path=str(folder / "train.json"),
                valid_data_path=str(folder / "valid.json"),
                vocab_size=400,
                output_path=str(folder / "out"),
            )
            | changes
        )
    )


def build(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> DataSets:
    return build_datasets(
        config.data, config.model, tokenizer, sft=config.training.sft,
        num_train_samples=config.training.train_iters * config.training.global_batch_size,
        seed=config.training.seed, index_folder=Path(config.checkpoint.output_path) / "data_index",
    )  # fmt: skip


def test_raw_sets_have_the_padded_length(tmp_path: Path) -> None:
    train, valid = build(raw_run(tmp_path, max_padding_length=24), tiny_tokenizer())
    assert (len(train), len(valid)) == (3, 1)
    assert train[0].tokens.shape == (24,)


def test_names_and_join_of_the_rows_reach_the_samples(tmp_path: Path) -> None:
    """Rows with the user's own keys give the samples of the same rows with the usual keys, joined by hand."""
    tokenizer = tiny_tokenizer()
    usual = build(raw_run(tmp_path), tokenizer).train
    rows = [{"q": "hel", "x": "lo", "a": answer} for answer in ("world", "again", "you")]
    (tmp_path / "own.json").write_text(json.dumps(rows))
    named = dict(columns="instruction=q,input=x,output=a", alpaca_input_join="empty")
    own = build(raw_run(tmp_path, train_data_path=str(tmp_path / "own.json"), **named), tokenizer).train
    for index in range(3):
        assert torch.equal(torch.stack(own[index][:3]), torch.stack(usual[index][:3]))


def test_without_validation_data_there_is_no_validation_set(tmp_path: Path) -> None:
    assert build(raw_run(tmp_path, valid_data_path="none"), tiny_tokenizer()).valid is None


def test_tokenizer_beyond_the_models_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="vocabulary has 250 rows"):
        build(raw_run(tmp_path, vocab_size=250), tiny_tokenizer())


def test_pretraining_sets_feed_every_step_and_one_evaluation(tmp_path: Path, shared_data: Path) -> None:
    """The real corpus, through the toolkit's writer, upstream's reader and our batches."""
    tokenizer = tiny_tokenizer()
    write_indexed([shared_data / "c4_demo.jsonl"], tokenizer, {"text": str(tmp_path / "c4")}, append_eod=True)
    config = small_run(
        dataset_type="idxmap", sft=False,
        train_data_path=str(tmp_path / "c4"), valid_data_path=str(tmp_path / "c4"),
        seq_length=64, vocab_size=400, train_iters=5, global_batch_size=4, output_path=str(tmp_path / "out"),
    )  # fmt: skip
    train, valid = build(config, tokenizer)
    assert len(train) >= 20
    options = dict(micro_batch_size=2, global_batch_size=4, dp_rank=0, dp_size=1, seed=1, shuffle=False)
    for batch in BatchReader(train, **options).step(4):
        assert batch.tokens.shape == (2, 64) and batch.loss_mask.all()
    size = (tmp_path / "c4.bin").stat().st_size // 2
    assert len(valid) == -(-(size - 1) // 64)


def build_on_rank(rank: int, world_size: int, folder: str, config: RunConfig, break_rank: int) -> str:
    tokenizer = load_tokenizer(folder)
    if rank == break_rank:
        tokenizer.chat_template = "{{ raise_exception('broken here') }}"
    try:
        build(config, tokenizer)
    except DataError as error:
        return str(error)
    return "built"


def test_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    config = raw_run(tmp_path)
    build_tiny_tokenizer(tmp_path / "tok")
    said = run_distributed(build_on_rank, 2, str(tmp_path / "tok"), config, 1)
    assert all("broken here" in each for each in said)
