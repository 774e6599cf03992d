"""Several pre-training sets, splits and borders of documents, against upstream's builder and dense masks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import run_distributed
from indexed_sets import consecutive, write_set
from llama3_tokenizer import tiny_tokenizer
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import (
    GPTDataset,
    GPTDatasetConfig,
    _get_ltor_masks_and_position_ids,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from small_runs import small_run

from patch.config.data_spec import parse_data
from patch.data.pretraining.dataset import PretrainSource, load_run_sets, load_training, load_validation
from patch.data.pretraining.run_sets import PretrainOptions
from patch.data.samples import Sample
from patch.errors import DataError

LENGTH, SEED, EOD, ROWS = 8, 5, 1, 1 << 15


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    """Of 300, 135 and 41 tokens, each set with numbers of its own."""
    sizes = ([30] * 10, [5, 10, 30] * 3, [41])
    return [
        write_set(tmp_path / f"set{i}", consecutive(each, 1000 * (i + 1))) for i, each in enumerate(sizes)
    ]


def options(folder: Path, **changes: Any) -> PretrainOptions:
    tokenizer = changes.pop("tokenizer", None)
    run = small_run(**({"seq_length": LENGTH, "vocab_size": ROWS} | changes))
    return PretrainOptions(run.data, run.model, tokenizer, SEED, folder / "index")


class UpstreamTokenizer:
    """What upstream's data sets ask of a tokenizer."""

    vocab_size, eod, pad = ROWS, EOD, -(2**60)
    unique_identifiers = {"class": "none"}


def upstream(
    prefixes: list[str], weights: list[float] | None, num_samples: int | None, split: str = "1"
) -> list[Any]:
    """The training, validation and test set of upstream's builder."""
    config = GPTDatasetConfig(
        random_seed=SEED, sequence_length=LENGTH, blend=(prefixes, weights), split=split,
        tokenizer=UpstreamTokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, drop_last_partial_validation_sequence=False,
    )  # fmt: skip
    sizes = [num_samples, None if weights is None else 1, None if weights is None else 1]
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def tokens_of(source: Any, count: int) -> list[list[int]]:
    samples = (source[index] for index in range(count))
    return [(s.tokens if isinstance(s, Sample) else s["tokens"]).tolist() for s in samples]


def test_place_of_a_sample_is_where_its_first_token_is_stored(prefixes: list[str], tmp_path: Path) -> None:
    stored = {prefix: IndexedDataset(prefix) for prefix in prefixes}
    blended = load_training(prefixes, [0.5, 0.3, 0.2], options(tmp_path), lambda _: 60)
    alone = load_training(prefixes[1:2], None, options(tmp_path), lambda _: 30)
    for source in (blended, alone):
        for index in range(30):
            prefix, _, rest = source.place(index).partition(": document ")
            document, _, token = rest.partition(", from its token ")
            assert stored[prefix].get(int(document) - 1)[int(token) - 1] == source[index].tokens[0]


@pytest.mark.parametrize("split", ["1", "80,20,0", "6,2,2"])
@pytest.mark.parametrize(
    ("which", "weights", "num_samples"),
    [
        ((0, 1), [0.7, 0.3], 20),
        ((0, 1), [7.0, 3.0], 500),
        ((1, 0), [1e-9, 1.0], 30),
        ((0, 1, 1), [1.0, 1.0, 2.0], 200),
        ((0, 1), None, 1),
        ((0, 1), None, 29),
        ((1,), None, 100),
    ],
)
@pytest.mark.long
def test_samples_and_their_order_are_those_of_upstreams_builder(
    tmp_path: Path,
    prefixes: list[str],
    which: tuple[int, ...],
    weights: list[float] | None,
    num_samples: int,
    split: str,
) -> None:
    chosen = [prefixes[index] for index in which]
    expected, *_ = upstream(chosen, weights, num_samples, split)
    source = load_training(chosen, weights, options(tmp_path, split=split), lambda one_pass: num_samples)
    assert source.num_samples == num_samples
    count = min(num_samples, len(expected))  # without weights, upstream ends after one pass
    assert tokens_of(source, count) == tokens_of(expected, count)
    for index in range(num_samples):
        assert torch.equal(source[index].labels[:-1], source[index].tokens[1:])
        assert source[index].loss_mask.all() and len(source[index].loss_mask) == LENGTH


@pytest.mark.parametrize("split", ["80,20,0", "1,1", "6,2,2"])
def test_validation_is_what_the_split_leaves_in_each_set(
    tmp_path: Path, prefixes: list[str], split: str
) -> None:
    for prefix in prefixes[:2]:
        expected = upstream([prefix], None, 3, split)[1]
        source = load_validation(prefix, options(tmp_path, split=split))
        assert len(source) == len(expected)
        assert tokens_of(source, len(source)) == tokens_of(expected, len(source))
        trained = load_training([prefix], None, options(tmp_path, split=split), lambda one_pass: 90)
        seen = {token for sample in tokens_of(trained, 90) for token in sample}
        assert not seen & {int(t) for s in source for t in s.labels[s.loss_mask.bool()]}


def passes_of(source: PretrainSource, first: int) -> float:
    samples = (source[index] for index in range(source.num_samples))
    taken = sum(first <= int(sample.tokens[0]) < first + 1000 for sample in samples)
    return taken * LENGTH


def test_sets_without_weights_are_read_equally_often(tmp_path: Path, prefixes: list[str]) -> None:
    """Beyond one pass, where upstream's builder has no more samples: four and a half passes."""
    source = load_training(prefixes[:2], None, options(tmp_path), lambda one_pass: int(4.5 * one_pass))
    assert source.num_samples == 4.5 * (299 // LENGTH + 134 // LENGTH) // 1
    for first, tokens in ((1000, 300), (2000, 135)):
        assert passes_of(source, first) / tokens == pytest.approx(4.5, abs=0.3)


def test_many_small_weights_need_no_more_samples_than_there_are(tmp_path: Path) -> None:
    """Upstream makes 19 samples of the 10, for which it has not built enough of the first set."""
    documents = [consecutive([89 if i == 0 else 33], 1000 * (i + 1)) for i in range(10)]
    names = [write_set(tmp_path / f"set{i}", each) for i, each in enumerate(documents)]
    weights = [0.91] + [0.01] * 9
    with pytest.raises(IndexError, match="oversamples"):
        upstream(names, weights, 10)
    source = load_training(names, weights, options(tmp_path), lambda one_pass: 10)
    assert [sample[0] // 1000 for sample in tokens_of(source, 10)].count(1) == 9


def on_rank(rank: int, world_size: int, prefixes: list[str], folder: str) -> list[list[int]]:
    source = load_training(prefixes, [2.0, 1.0], options(Path(folder)), lambda one_pass: 50)
    return tokens_of(source, 50)


def test_all_ranks_read_the_same_blend(tmp_path: Path, prefixes: list[str]) -> None:
    """From index files, which a process without a group does not write for the blend."""
    first, second = run_distributed(on_rank, 2, prefixes[:2], str(tmp_path))
    assert list((tmp_path / "index").glob("*-BlendedDataset-train-dataset_index.npy"))
    assert first == second == on_rank(0, 1, prefixes[:2], str(tmp_path / "alone"))


@pytest.mark.parametrize(
    ("changes", "said", "field"),
    [
        (dict(split="99,1,0"), "--split 99,1,0 leaves 0 tokens in 0 of 10 documents for validation", "split"),
        (dict(split="1,0"), "leaves 0 tokens in 0 of 10 documents for validation", "split"),
        (dict(reset_attention_mask=True), "no token ends its documents", "reset_attention_mask"),
        (dict(eod_mask_loss=True), "no token ends its documents", "eod_mask_loss"),
    ],
)
def test_what_a_set_cannot_give_is_refused(
    tmp_path: Path, prefixes: list[str], changes: dict, said: str, field: str
) -> None:
    with pytest.raises(DataError, match=said) as caught:
        load_validation(prefixes[0], options(tmp_path, **changes))
    assert caught.value.field == field


def test_set_too_short_for_a_sample_needs_a_weight(tmp_path: Path, prefixes: list[str]) -> None:
    short = write_set(tmp_path / "short", consecutive([LENGTH], 9000))
    with pytest.raises(DataError, match="short: has 8 tokens for training, expected at least 9"):
        load_training([prefixes[0], short], None, options(tmp_path), lambda one_pass: 10)
    source = load_training([prefixes[0], short], [1.0, 1.0], options(tmp_path), lambda one_pass: 10)
    assert [sample[0] // 1000 for sample in tokens_of(source, 10)].count(9) == 5


def upstream_dense(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Upstream's mask (True: hidden), loss mask and position ids of one sample with all three resets."""
    mask, loss_mask, positions = _get_ltor_masks_and_position_ids(tokens, EOD, True, True, True, True)
    return mask[0], loss_mask, positions


def visible(lengths: torch.Tensor) -> torch.Tensor:
    """[S, S]: the tokens that each token attends to, if sequences of these lengths are apart."""
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths.long())
    return (sequence[:, None] == sequence[None, :]).tril()


def test_borders_of_documents_are_those_of_upstreams_mask(tmp_path: Path) -> None:
    """Random documents: ends at the first and last token of a sample, one after the other, or none."""
    pick = np.random.RandomState(0)
    sizes = [0, 1, 0, 12, 20, 7, 8, 3, *pick.randint(0, 6, 60)]
    prefix = write_set(tmp_path / "set", [[*pick.randint(2, 200, size), EOD] for size in sizes])
    tokenizer = tiny_tokenizer()
    assert tokenizer.eos_token_id == EOD
    asked = options(tmp_path, tokenizer=tokenizer, reset_attention_mask=True, eod_mask_loss=True)
    plain = load_training([prefix], None, options(tmp_path), lambda one_pass: 90)
    source = load_training([prefix], None, asked, lambda one_pass: 90)
    seen = set()
    for index in range(90):
        sample, unmasked = source[index], plain[index]
        assert torch.equal(sample.tokens, unmasked.tokens) and unmasked.lengths is None
        hidden, loss_mask, positions = upstream_dense(sample.tokens)
        assert sample.lengths is not None and sample.lengths.dtype == torch.int32
        assert int(sample.lengths.sum()) == LENGTH and int(sample.lengths.min()) > 0
        assert torch.equal(visible(sample.lengths), ~hidden)
        assert torch.equal(torch.cat([torch.arange(n) for n in sample.lengths.tolist()]), positions)
        assert torch.equal(sample.loss_mask, loss_mask)
        seen.add(len(sample.lengths))
        seen |= {"first"} if sample.tokens[0] == EOD else set()
        seen |= {"last"} if sample.tokens[-1] == EOD else set()
    assert {1, 2, 3, "first", "last"} <= seen


def test_run_names_its_sets(tmp_path: Path, prefixes: list[str], logged: list[str]) -> None:
    """Weights at position 20, several sets at position 21; validation from the split without position 21."""
    tokenizer = tiny_tokenizer()

    def sets(**changes: Any) -> Any:
        config = small_run(
            dataset_type="idxmap", sft=False, seq_length=LENGTH, vocab_size=ROWS, seed=SEED, **changes
        )
        named = [config.data.train_data_path, config.data.valid_data_path]
        train, valid = (() if text is None else parse_data(text) for text in named)
        options = PretrainOptions(config.data, config.model, tokenizer, SEED, tmp_path / "index")
        return load_run_sets(options, train, valid, lambda one_pass: 2 * one_pass)

    first, second, third = prefixes
    train, found = sets(train_data_path=f"0.7 {first} 0.3 {second}", valid_data_path=f"{second} {third}")
    one_pass = 299 // LENGTH + 134 // LENGTH
    assert train.num_samples == 2 * one_pass
    expected, *_ = upstream([first, second], [0.7, 0.3], 2 * one_pass)
    assert tokens_of(train, 2 * one_pass) == tokens_of(expected, 2 * one_pass)
    assert [len(source) for _, source in found] == [-(-134 // LENGTH), -(-40 // LENGTH)]
    assert sum("cannot be checked which tokenizer" in message for message in logged) == 4
    assert any(f"{first}: the run takes" in message for message in logged)
    train, found = sets(train_data_path=f"{first} {second}", split="8,2")
    assert [len(source) for _, source in found] == [-(-59 // LENGTH), -(-39 // LENGTH)]
    assert [part.path for part, _ in found] == [first, second]
    assert sets(train_data_path=first, split="9")[1] == []
    _, kept = sets(train_data_path=first, split="5,0,5", valid_data_path=third)
    assert [len(source) for _, source in kept] == [-(-40 // LENGTH)]
