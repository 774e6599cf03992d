"""The cut of sequences over context-parallel ranks."""

import pytest
import torch

from patch.data.samples import Sample, collate, cut_batch
from patch.distributed.context_group import WHOLE, Zigzag, join_parts, split_parts


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_token_is_on_one_rank_and_causal_work_is_even(size: int) -> None:
    length = 12 * size
    tokens = torch.arange(length)
    parts = [Zigzag(rank, size).cut(tokens, 0) for rank in range(size)]
    assert sorted(torch.cat(parts).tolist()) == tokens.tolist()
    assert all(part.tolist() == sorted(part.tolist()) for part in parts)
    work = [int((part + 1).sum()) for part in parts]  # a token sees itself and those before it
    assert len(set(work)) == 1
    assert Zigzag(0, 2).cut(torch.arange(8), 0).tolist() == [0, 1, 6, 7]


def test_spans_are_the_tokens_of_the_cut() -> None:
    tokens = torch.arange(24)
    for rank in range(3):
        part = Zigzag(rank, 3).cut(tokens, 0)
        for begin in range(24):
            for end in range(begin, 25):
                spans = Zigzag(rank, 3).spans_within(24, begin, end)
                found = [p + i for p, _, count in spans for i in range(count)]
                assert found == [t for t in part.tolist() if begin <= t < end]
                assert found == [part[o + i] for _, o, count in spans for i in range(count)]


def test_parts_are_joined_in_the_order_of_positions() -> None:
    whole = torch.randn(24, 2, 5)
    parts = torch.stack([Zigzag(rank, 3).cut(whole, 0) for rank in range(3)])
    assert torch.equal(join_parts(parts), whole)
    assert torch.equal(split_parts(whole, 3), parts)


def test_all_that_tokens_have_is_cut_alike() -> None:
    lengths, rows = torch.tensor([3, 5], dtype=torch.int32), (torch.arange(8), torch.arange(8, 16))
    first, second = (Sample(row, row + 1, row / 2, None, {"more": row * 3}) for row in rows)
    batch = collate([first._replace(lengths=lengths), second])
    own = cut_batch(batch, Zigzag(1, 2)).to(torch.device("cpu"))
    assert own.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(own.labels, own.tokens + 1) and torch.equal(own.loss_mask, own.tokens / 2)
    assert torch.equal(own.extra_tensors["more"], own.tokens * 3) and own.cu_seqlens is batch.cu_seqlens
    assert own.cu_seqlens.tolist() == [0, 3, 8, 16]
    assert cut_batch(batch, WHOLE).tokens is batch.tokens
