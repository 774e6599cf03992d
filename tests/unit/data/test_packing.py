"""Packs against a plain best-fit decreasing, and packed samples against those of one conversation each."""

import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from llama3_tokenizer import tiny_tokenizer

from patch.data.packing import PackedSource, PackingSummary, pack
from patch.data.sft.source import SftSource, load_sft

CAPACITY = 200


def rooms_left(sizes: np.ndarray, packs: Iterator[np.ndarray], capacity: int) -> list[int]:
    return sorted(capacity - int(sizes[members].sum()) for members in packs)


def one_by_one(sizes: np.ndarray, capacity: int) -> list[int]:
    """The room left in each pack of the textbook's best-fit decreasing, which tries every pack."""
    rooms: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fitting = [room for room in rooms if room >= size]
        if fitting:
            rooms.remove(min(fitting))
        rooms.append((min(fitting) if fitting else capacity) - size)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(40))
def test_packs_are_those_of_best_fit_decreasing(seed: int) -> None:
    random = np.random.default_rng(seed)
    capacity = int(random.integers(1, 60))
    sizes = random.integers(1, random.integers(1, capacity + 1) + 1, random.integers(1, 120))
    packs = pack(sizes, capacity)
    assert rooms_left(sizes, iter(packs), capacity) == one_by_one(sizes, capacity)
    assert sorted(packs.members.tolist()) == list(range(len(sizes)))


def test_same_sizes_give_the_same_packs_and_members_keep_their_order() -> None:
    sizes = np.random.default_rng(0).integers(1, 20, 500)
    first, second = pack(sizes, 20), pack(sizes.copy(), 20)
    np.testing.assert_array_equal(first.members, second.members)
    np.testing.assert_array_equal(first.ends, second.ends)
    assert all((np.diff(members) > 0).all() for members in first)
    # Of conversations of one size the earlier ones come into the earlier packs.
    assert [members.tolist() for members in pack(np.array([3, 3, 3, 3, 3]), 7)] == [[0, 1], [2, 3], [4]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SftSource:
    """Conversations of several lengths, the last one of which is cut to fill a sample."""
    path = tmp_path_factory.mktemp("rows") / "rows.json"
    counts = (3, 40, 1, 22, 9, 15, 2, 400)
    path.write_text(json.dumps([{"instruction": "hello", "output": "world " * count} for count in counts]))
    return load_sft(path, tiny_tokenizer(), CAPACITY)


def test_a_pack_has_the_tokens_labels_and_masks_of_its_conversations(source: SftSource) -> None:
    packs = pack(source.sizes, CAPACITY)
    samples = PackedSource(source, CAPACITY, is_packed=True)
    assert len(samples) == len(packs) < len(source) and not samples.is_shuffled
    assert source.sizes[-1] == CAPACITY, "one fills its sample"
    for members, sample in zip(packs, samples, strict=True):
        assert sample.tokens.shape == sample.labels.shape == sample.loss_mask.shape == (CAPACITY,)
        assert sample.lengths.dtype == torch.int32 and sample.lengths.sum() == CAPACITY
        begin = 0
        for member, length in zip(members, sample.lengths.tolist(), strict=False):
            alone, part = source[int(member)], slice(begin, begin + length)
            assert alone.loss_mask.sum() == alone.loss_mask[:length].sum() > 0
            for name in ("tokens", "labels", "loss_mask"):
                ours, theirs = getattr(sample, name), getattr(alone, name)
                assert ours.dtype == theirs.dtype
                torch.testing.assert_close(ours[part], theirs[:length], rtol=0, atol=0)
            begin += length
        assert not sample.loss_mask[begin:].any()
        assert len(sample.lengths) == len(members) + (begin < CAPACITY)


def test_summary_says_what_the_tokens_are_used_for(source: SftSource) -> None:
    samples = PackedSource(source, CAPACITY, is_packed=True)
    slots, unpacked = len(samples) * CAPACITY, len(source) * CAPACITY
    learned = sum(float(sample.loss_mask.sum()) for sample in source) / slots
    tokens = int(source.sizes.sum())
    assert str(PackingSummary.of(samples)) == (
        f"8 conversations in {len(samples)} packs of {CAPACITY} tokens: {learned:.1%} learned, "
        f"{tokens / slots - learned:.1%} context, {1 - tokens / slots:.1%} padding "
        f"(unpacked {1 - tokens / unpacked:.1%} padding); a step holds {8 / len(samples):.2f} times as much"
    )
