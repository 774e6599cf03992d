"""Order is a function of seed, epoch and index: of a set, of several, and of a rank's micro-batches."""

import random

import numpy as np
import pytest
import torch

from patch.data import Batch, BatchReader, Sample, collate
from patch.data.order import Blend, Concatenation, ShuffledOrder


class Named:
    """Sample i of set s holds the numbers s and i."""

    is_shuffled = False

    def __init__(self, name: int, size: int) -> None:
        self._name, self._size = name, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < self._size
        tokens = torch.tensor([self._name, index])
        return Sample(tokens, tokens + 100, torch.ones(2))


def reader(size: int, **changes) -> BatchReader:
    options = dict(micro_batch_size=1, global_batch_size=4, dp_rank=0, dp_size=1, seed=3, shuffle=True)
    return BatchReader(Named(0, size), **(options | changes))


def numbers(batches: list[Batch]) -> list[int]:
    return [int(row[1]) for batch in batches for row in batch.tokens]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("larger", [2, 8])
def test_another_batch_size_goes_on_where_the_first_stopped(larger: int, shuffle: bool) -> None:
    """Three steps of four samples, then those of a run that has another batch size from there on."""
    before, whole = reader(36, shuffle=shuffle), reader(36, global_batch_size=36, shuffle=shuffle)
    after = reader(36, global_batch_size=larger, shuffle=shuffle, ahead=3 * 4 - 3 * larger)
    steps = 3 + (36 - 12) // larger
    assert len(after) == steps
    found = [before.step(iteration) for iteration in range(3)]
    found += [after.step(iteration) for iteration in range(3, steps)]
    assert [number for step in found for number in numbers(step)] == numbers(whole.step(0))


def test_order_is_the_one_that_earlier_versions_gave() -> None:
    """A run resumed with a later NumPy or a later version of the project goes on in the same order."""
    golden = [[1, 6, 4, 0, 3, 5, 2, 7], [6, 7, 4, 2, 0, 1, 5, 3]]
    source = reader(8, global_batch_size=8, seed=1234)
    assert [numbers(source.step(iteration)) for iteration in range(2)] == golden
    blend = Blend([Named(0, 4), Named(1, 3)], [2, 1], num_samples=9, seed=1234)
    assert [tuple(sample.tokens.tolist()) for sample in map(blend.__getitem__, range(9))] == [
        *[(0, 1), (1, 2), (0, 0), (0, 2), (1, 1)],
        *[(0, 3), (0, 0), (1, 0), (0, 2)],
    ]


@pytest.mark.parametrize("size", [1, 2, 7])
def test_order_of_a_set_is_one_permutation_after_the_other(size: int) -> None:
    """Written out from the start, as a program without random access would do it."""
    expected: list[int] = []
    for epoch in range(4):
        stream = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([77, epoch])))
        expected += stream.permutation(np.arange(size)).tolist()
    order = ShuffledOrder(size, 77)
    assert [order[index] for index in range(4 * size)] == expected
    assert [order[index] for index in reversed(range(4 * size))] == expected[::-1]


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("mbs", [1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_micro_batch_of_a_rank_is_one_of_the_single_process(dp: int, mbs: int, shuffle: bool) -> None:
    """Micro-batch m of rank r is micro-batch m * DP + r: then losses can be compared bit by bit."""
    options = {"micro_batch_size": mbs, "global_batch_size": 8 * mbs, "shuffle": shuffle}
    for iteration in range(2):
        alone = reader(21, **options).step(iteration)
        ranks = [reader(21, dp_rank=rank, dp_size=dp, **options).step(iteration) for rank in range(dp)]
        assert [len(batches) for batches in ranks] == [8 // dp] * dp
        for rank, batches in enumerate(ranks):
            for index, batch in enumerate(batches):
                assert batch.cu_seqlens is None and batch.tokens.shape == (mbs, 2)
                for name in ("tokens", "labels", "loss_mask"):
                    mine, expected = (getattr(each, name) for each in (batch, alone[index * dp + rank]))
                    torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [8, 9, 11, 1])
@pytest.mark.parametrize("dp", [1, 2])
def test_evaluation_counts_each_sample_once_in_the_sources_order(size: int, dp: int) -> None:
    learned: list[int] = []
    one_pass = [reader(size, micro_batch_size=2, dp_rank=r, dp_size=dp, shuffle=False) for r in range(dp)]
    assert [len(each) for each in one_pass] == [-(-size // 4)] * dp
    for iteration in range(len(one_pass[0])):
        batches = [each.step(iteration) for each in one_pass]
        for batch in (batch for of_ranks in zip(*batches, strict=True) for batch in of_ranks):
            learned += batch.tokens[batch.loss_mask.sum(1) > 0][:, 1].tolist()
    assert learned == list(range(size))


def _sample(*lengths: int) -> Sample:
    of_parts = torch.tensor(lengths, dtype=torch.int32) if lengths else None
    return Sample(torch.arange(6), torch.arange(6), torch.ones(6), of_parts)


def test_borders_of_packed_samples_are_counted_row_after_row() -> None:
    batch = collate([_sample(2, 3, 1), _sample(6), _sample(1, 5)])
    assert batch.tokens.shape == (3, 6) and batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 6, 12, 13, 18]
    assert collate([_sample(), _sample(4, 2)]).cu_seqlens.tolist() == [0, 6, 10, 12]
    assert collate([_sample()] * 2).cu_seqlens is None


@pytest.mark.parametrize("num_sets", [1, 2, 3, 5, 12])
def test_each_sample_of_a_blend_is_of_the_set_that_lacks_most(num_sets: int) -> None:
    """Megatron's rule, written in Python; a shorter run has the same samples."""
    pick = random.Random(num_sets)
    weights = [round(pick.uniform(0.01, 1), 3) for _ in range(num_sets)]
    shares = np.array(weights) / sum(weights)
    sources = [Named(name, pick.randint(1, 9)) for name in range(num_sets)]
    blend, short = (Blend(sources, weights, num_samples=size, seed=3) for size in (400, 150))
    counts = np.zeros(num_sets, int)
    for index in range(400):
        which = int(np.argmax(shares * max(index, 1) - counts))
        size = len(sources[which])
        expected = [which, ShuffledOrder(size, 3, which)[int(counts[which])]]
        assert blend[index].tokens.tolist() == expected
        assert index >= 150 or short[index].tokens.tolist() == expected
        counts[which] += 1
        assert (np.abs(counts - (index + 1) * shares) < (1 if num_sets < 4 else 2)).all()
    assert blend.is_shuffled and len(blend) == 400
    assert blend.passes() == pytest.approx([n / len(each) for n, each in zip(counts, sources, strict=True)])


def test_sets_without_weights_are_read_as_one_set_of_all_their_samples() -> None:
    both = Concatenation([Named(0, 3), Named(1, 1), Named(2, 6)])
    assert len(both) == 10 and not both.is_shuffled
    found = [tuple(both[index].tokens.tolist()) for index in range(10)]
    assert found == [(name, index) for name, size in enumerate((3, 1, 6)) for index in range(size)]
    for source in (both, Blend([Named(0, 4), Named(1, 6)], [1, 1], num_samples=10, seed=1)):
        for index in (-1, 10):
            with pytest.raises(IndexError):
                source[index]
