"""Fine-tuning sets in .bin/.idx, written by Pai-Megatron-Patch's description and read back."""

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from indexed_sets import write_set
from llama3_tokenizer import tiny_tokenizer
from small_runs import small_run

from patch.data.pretraining.indexed_sft import IndexedSftSource, load_indexed_sft
from patch.errors import DataError

LENGTH, PAD, ROWS = 16, 4, 400
tokenizer = functools.cache(tiny_tokenizer)


class Talk(NamedTuple):
    """A conversation of a prompt and an answer, in ids."""

    prompt: list[int]
    answer: list[int]


def talk(prompt: int, answer: int, first: int) -> Talk:
    return Talk([*range(first, first + prompt)], [*range(first + prompt, first + prompt + answer)])


PACKS = [
    [talk(3, 5, 10), talk(2, 6, 30)],  # full: two conversations of eight
    [talk(6, 10, 50)],  # one full sequence
    [talk(4, 3, 70)],  # padded
    [talk(1, 1, 90), talk(1, 2, 100), talk(5, 1, 110)],  # padded, with short ones
    [talk(2, 13, 200)],  # padding of one token
]


def document(pack: list[Talk], length: int = LENGTH) -> list[int]:
    """2 x length numbers: ids, the last of each conversation negated; then labels, shifted already."""
    ids, labels = [], []
    for prompt, answer in pack:
        whole = prompt + answer
        labels += [-100] * (len(prompt) - 1) + answer + [-100]
        ids += [*whole[:-1], -1 - whole[-1]]
    padding = length - len(ids)
    return ids + [PAD] * padding + labels + [-100] * padding


def load(prefix: str, length: int = LENGTH, rows: int = ROWS) -> IndexedSftSource:
    return load_indexed_sft(prefix, tokenizer(), small_run(seq_length=length, vocab_size=rows).model)


def test_every_pack_is_read_as_its_conversations(tmp_path: Path, logged: list[str]) -> None:
    source = load(write_set(tmp_path / "set", [document(pack) for pack in PACKS]))
    assert len(source) == len(PACKS) and not source.is_shuffled
    for index, pack in enumerate(PACKS):
        sample = source[index]
        sizes = [len(prompt) + len(answer) for prompt, answer in pack]
        padding = LENGTH - sum(sizes)
        assert sample.lengths.tolist() == sizes + ([padding] if padding else [])
        assert (sample.tokens.dtype, sample.labels.dtype) == (torch.int64, torch.int64)
        assert (sample.loss_mask.dtype, sample.lengths.dtype) == (torch.float32, torch.int32)
        start, learned = 0, []
        for prompt, answer in pack:
            end = start + len(prompt) + len(answer)
            assert sample.tokens[start:end].tolist() == prompt + answer
            learned += answer
            assert not sample.loss_mask[end - 1]
            start = end
        assert sample.labels[sample.loss_mask.bool()].tolist() == learned
        assert not sample.loss_mask[start:].any()
    assert any("cannot be checked which tokenizer made the set" in message for message in logged)


def test_set_of_an_older_version_without_marked_ends_is_one_conversation_each(tmp_path: Path) -> None:
    documents = [[id if id >= 0 or id == -100 else -1 - id for id in document(pack)] for pack in PACKS[1:3]]
    source = load(write_set(tmp_path / "set", documents))
    assert source[0].lengths.tolist() == [LENGTH] == source[1].lengths.tolist()


def changed(place: int, value: int) -> list[int]:
    numbers = document(PACKS[0])
    numbers[place] = value
    return numbers


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ([document(PACKS[0], 20)], "documents of 40 numbers, expected 32: .* made for sequences of 20"),
        ([document(PACKS[0]), document(PACKS[0], 20)], "documents of 32 to 40 numbers; expected a fine-t"),
        ([[5, 6] * 16], "document 1: label 1 is not the next token"),
        ([document(PACKS[0]), changed(LENGTH + 3, 15)], "document 2: label 4 is not the next token"),
        ([changed(2 * LENGTH - 1, 30)], "document 1: label 16 is not the next token"),
        ([changed(LENGTH + 3, -7)], "has token id -7"),
        ([changed(0, ROWS)], f"has token id {ROWS}, the model's vocabulary has {ROWS} rows"),
    ],
)
def test_other_sets_are_refused(tmp_path: Path, documents: list[list[int]], said: str) -> None:
    """NumPy 1 wrapped -100 around where the vocabulary is small."""
    with pytest.raises(DataError, match=said):
        load(write_set(tmp_path / "set", documents))
    with pytest.raises(DataError, match="ids of type uint16, which cannot hold -100"):
        load(write_set(tmp_path / "small", [document(PACKS[0])], np.uint16))
