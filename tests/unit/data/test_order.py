"""Order is a function of seed, epoch and index; sets with weights have their shares at every sample."""

import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from patch.data.batches import BatchReader
from patch.data.blend import Blend, Concatenation
from patch.data.order import ShuffledOrder, WeightedTurns
from patch.data.samples import Sample

RANDOM = random.Random(12)
WEIGHTS = [
    [1.0], [0.7, 0.3], [0.5, 0.3, 0.2], [1, 1, 1], [3, 2, 2, 1e-9], [0.1, 0.1, 0.1, 0.7], [1e-9, 1e9],
    [1 / 3, 2 / 3],
    *([round(RANDOM.uniform(0.01, 1), 3) for _ in range(size)] for size in (2, 3, 3, 4, 4, 4)),
]  # fmt: skip
MANY = [[round(RANDOM.uniform(0.01, 1) ** 3 + 1e-4, 4) for _ in range(size)] for size in (5, 6, 8, 12, 30)]


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
        return Sample(tokens, tokens, torch.ones(2))


def shares_of(weights: list[float]) -> list[Fraction]:
    exact = [Fraction(str(weight)) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def names(source: Blend, indices: range) -> list[tuple[int, ...]]:
    return [tuple(source[index].tokens.tolist()) for index in indices]


@pytest.mark.parametrize("weights", WEIGHTS + MANY, ids=lambda weights: f"{len(weights)} sets")
def test_every_set_has_its_share_at_every_sample(weights: list[float]) -> None:
    """Counted one by one, against shares in exact fractions; and each turn goes on where the set was."""
    turns, shares, counts = WeightedTurns(weights), shares_of(weights), [0] * len(weights)
    bound = 1 if len(weights) <= 4 else Fraction(11, 10)
    for index in range(400):
        which, turn = turns.turn(index)
        assert turn == counts[which]
        counts[which] += 1
        assert turns.counts(index + 1) == counts
        assert all(abs(c - (index + 1) * s) < bound for c, s in zip(counts, shares, strict=True)), index


@pytest.mark.parametrize("start", [10**9, 10**12 + 7, 10**18])
@pytest.mark.parametrize("weights", WEIGHTS, ids=lambda weights: f"{len(weights)} sets")
def test_shares_are_exact_after_any_number_of_samples_without_counting_them(
    weights: list[float], start: int
) -> None:
    turns, shares = WeightedTurns(weights), shares_of(weights)
    before, after = turns.counts(start), turns.counts(start + 200)
    assert sum(before) == start
    assert all(abs(c - start * s) < 1 for c, s in zip(before, shares, strict=True))
    counts = list(before)
    for index in range(start, start + 200):
        which, turn = turns.turn(index)
        assert turn == counts[which]
        counts[which] += 1
    assert counts == after


def test_set_of_weight_1e_9_has_one_sample_in_a_thousand_million() -> None:
    turns = WeightedTurns([1, 1e-9])
    assert turns.counts(10**9 + 1) == [10**9, 1]
    assert turns.counts(10**6) == [10**6, 0]


def test_turns_depend_on_the_ratio_of_weights_alone() -> None:
    first, second = WeightedTurns([0.7, 0.2, 0.1]), WeightedTurns([7000, 2e3, 1000.0])
    assert [first.turn(k) for k in range(300)] == [second.turn(k) for k in range(300)]


def test_order_of_weighted_sets_is_the_one_that_earlier_versions_gave() -> None:
    """A resumed run goes on in the same order."""
    turns = WeightedTurns([0.5, 0.3, 0.2])
    assert "".join("abc"[turns.turn(index)[0]] for index in range(20)) == "abacabacababacabacab"
    blend = Blend([Named(0, 4), Named(1, 3)], [2, 1], num_samples=9, seed=1234)
    assert names(blend, range(9)) == [
        *[(0, 1), (1, 2), (0, 0), (0, 2), (1, 1)],
        *[(0, 3), (0, 0), (1, 0), (0, 2)],
    ]


def test_each_set_of_a_blend_has_epochs_of_its_own() -> None:
    sizes = [5, 1, 8]
    blend = Blend([Named(i, size) for i, size in enumerate(sizes)], [0.2, 0.5, 0.3], num_samples=400, seed=3)
    seen = names(blend, range(400))
    for which, size in enumerate(sizes):
        own = [index for name, index in seen if name == which]
        epochs = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs) and len(epochs) > 9
        assert size == 1 or len({tuple(epoch) for epoch in epochs}) > 1
    assert [round(passes) for passes in blend.passes()] == [16, 200, 15]


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


def test_sets_of_one_size_have_different_orders_and_the_first_that_of_a_set_alone() -> None:
    orders = [[ShuffledOrder(50, 9, which)[index] for index in range(100)] for which in range(3)]
    assert len({tuple(order) for order in orders}) == 3
    assert orders[0] == [ShuffledOrder(50, 9)[index] for index in range(100)]


@pytest.mark.parametrize("start", [0, 17, 203])
def test_blend_resumed_in_the_middle_of_an_epoch_goes_on_in_its_order(start: int) -> None:
    def blend(num_samples: int) -> Blend:
        return Blend([Named(0, 30), Named(1, 7)], [0.6, 0.4], num_samples=num_samples, seed=5)

    assert names(blend(260), range(start, 260)) == names(blend(300), range(260))[start:]


def test_sets_without_weights_are_read_as_one_set_of_all_their_samples() -> None:
    """The same batches as one file with the rows of all: also the shuffled order is that of one set."""
    parts = [Named(0, 3), Named(0, 1), Named(0, 6)]

    both = Concatenation(parts)
    assert len(both) == 10 and not both.is_shuffled
    assert [both[index].tokens[1].item() for index in range(10)] == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5]
    options = dict(micro_batch_size=2, global_batch_size=4, dp_rank=0, dp_size=1, seed=1, shuffle=True)
    joined, alone = BatchReader(both, **options), BatchReader(Named(0, 10), **options)
    number_of = {index: both[index].tokens.tolist() for index in range(10)}
    for iteration in range(6):
        for ours, theirs in zip(joined.step(iteration), alone.step(iteration), strict=True):
            assert ours.tokens.tolist() == [number_of[row[1]] for row in theirs.tokens.tolist()]


@pytest.mark.parametrize("index", [-1, 10])
def test_index_outside_of_the_sets_is_refused(index: int) -> None:
    sources = [Named(0, 4), Named(1, 6)]
    for source in (Concatenation(sources), Blend(sources, [1, 1], num_samples=10, seed=1)):
        with pytest.raises(IndexError):
            source[index]
