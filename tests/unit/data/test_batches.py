"""Each sample once an epoch, the same micro-batches at every DP, and resume by iteration alone."""

import pytest
import torch

from patch.data.batches import BatchReader
from patch.data.samples import Sample, collate


class Counting:
    """Sample i holds the number i, all of it learned."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Sample:
        assert 0 <= index < self._size
        return Sample(torch.full((2,), index), torch.full((2,), index + 100), torch.ones(2))


def reader(
    size: int, *, mbs: int = 1, gbs: int = 4, rank: int = 0, dp: int = 1, seed: int = 3, shuffle: bool = True,
    ahead: int = 0,
):  # fmt: skip
    return BatchReader(
        Counting(size), micro_batch_size=mbs, global_batch_size=gbs, dp_rank=rank, dp_size=dp, seed=seed,
        shuffle=shuffle, ahead=ahead,
    )  # fmt: skip


def numbers(batches: list) -> list[int]:
    return [int(row[0]) for batch in batches for row in batch.tokens]


def test_batch_has_documented_shapes_and_types() -> None:
    (batch,) = reader(8, mbs=4).step(0)
    assert batch.cu_seqlens is None
    for tensor, dtype in zip(batch[:3], (torch.int64, torch.int64, torch.float32), strict=True):
        assert tensor.shape == (4, 2) and tensor.dtype == dtype
    torch.testing.assert_close(batch.labels, batch.tokens + 100)


@pytest.mark.parametrize("size", [4, 7, 10, 3, 1])
def test_each_epoch_takes_each_sample_once(size: int) -> None:
    """Also when epochs end within a global batch, or a global batch spans several epochs."""
    source = reader(size)
    seen = [number for iteration in range(3 * size) for number in numbers(source.step(iteration))]
    epochs = [seen[start : start + size] for start in range(0, len(seen), size)]
    assert len(epochs) == 12
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
    if size > 4:
        assert epochs[0] != epochs[1] and epochs[0] != sorted(epochs[0])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("larger", [2, 8])
def test_another_batch_size_goes_on_where_the_first_stopped(larger: int, shuffle: bool) -> None:
    """Three steps of four samples, then those of a run that has another batch size from there on."""
    before, whole = reader(36, shuffle=shuffle), reader(36, gbs=36, shuffle=shuffle)
    after = reader(36, gbs=larger, shuffle=shuffle, ahead=3 * 4 - 3 * larger)
    steps = 3 + (36 - 12) // larger
    assert len(after) == steps
    found = [before.step(iteration) for iteration in range(3)]
    found += [after.step(iteration) for iteration in range(3, steps)]
    assert [number for step in found for number in numbers(step)] == numbers(whole.step(0))


def test_order_depends_on_seed() -> None:
    orders = [numbers(reader(50, gbs=48, seed=seed).step(0)) for seed in (1, 2, 1)]
    assert orders[0] == orders[2] != orders[1]


def test_order_is_the_one_that_earlier_versions_gave() -> None:
    """A run resumed with a later NumPy or a later version of the project goes on in the same order."""
    golden = [[1, 6, 4, 0, 3, 5, 2, 7], [6, 7, 4, 2, 0, 1, 5, 3]]
    source = reader(8, gbs=8, seed=1234)
    assert [numbers(source.step(iteration)) for iteration in range(2)] == golden


@pytest.mark.parametrize("shuffle", [True, False])
def test_resumed_reader_goes_on_where_the_first_stopped(shuffle: bool) -> None:
    whole = reader(30, mbs=2, shuffle=shuffle)
    straight = [numbers(whole.step(iteration)) for iteration in range(7)]
    for start in (6, 3, 0):
        assert numbers(reader(30, mbs=2, shuffle=shuffle).step(start)) == straight[start]


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("mbs", [1, 2])
@pytest.mark.parametrize("shuffle", [True, False])
def test_micro_batch_of_a_rank_is_one_of_the_single_process(dp: int, mbs: int, shuffle: bool) -> None:
    """Micro-batch m of rank r is micro-batch m * DP + r: then losses can be compared bit by bit."""
    options = {"mbs": mbs, "gbs": 8 * mbs, "shuffle": shuffle}
    for iteration in range(2):
        alone = reader(21, **options).step(iteration)
        ranks = [reader(21, rank=rank, dp=dp, **options).step(iteration) for rank in range(dp)]
        assert [len(batches) for batches in ranks] == [8 // dp] * dp
        for rank, batches in enumerate(ranks):
            for index, batch in enumerate(batches):
                for mine, expected in zip(batch[:3], alone[index * dp + rank][:3], strict=True):
                    torch.testing.assert_close(mine, expected, rtol=0, atol=0)


@pytest.mark.parametrize("size", [8, 9, 11, 1])
@pytest.mark.parametrize("dp", [1, 2])
def test_evaluation_counts_each_sample_once(size: int, dp: int) -> None:
    learned: list[int] = []
    for rank in range(dp):
        one_pass = reader(size, mbs=2, rank=rank, dp=dp, shuffle=False)
        assert len(one_pass) == -(-size // 4)
        for iteration in range(len(one_pass)):
            for batch in one_pass.step(iteration):
                assert batch.tokens.shape == (2, 2)
                learned += [int(row[0]) for row in batch.tokens[batch.loss_mask.sum(1) > 0]]
    assert sorted(learned) == list(range(size))


def test_one_pass_keeps_the_sources_order() -> None:
    assert numbers(reader(8, shuffle=False).step(1)) == [4, 5, 6, 7]


def _sample(*lengths: int) -> Sample:
    return Sample(torch.arange(6), torch.arange(6), torch.ones(6), torch.tensor(lengths, dtype=torch.int32))


def test_borders_of_packed_samples_are_counted_row_after_row() -> None:
    batch = collate([_sample(2, 3, 1), _sample(6), _sample(1, 5)])
    assert batch.tokens.shape == (3, 6) and batch.cu_seqlens.dtype == torch.int32
    assert batch.cu_seqlens.tolist() == [0, 2, 5, 6, 12, 13, 18]


def test_a_sample_without_lengths_is_one_sequence_beside_packed_ones() -> None:
    batch = collate([_sample()._replace(lengths=None), _sample(4, 2)])
    assert batch.cu_seqlens.tolist() == [0, 6, 10, 12]
    assert collate([_sample()._replace(lengths=None)] * 2).cu_seqlens is None
