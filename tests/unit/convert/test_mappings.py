"""Mappings against layouts written out by hand, row by row."""

import pytest
import torch

from patch.convert.mappings import (
    GatedMLPMapping,
    HFTensor,
    QKVMapping,
    ReplicatedMapping,
    RowParallelMapping,
    TPShard,
    VocabParallelMapping,
)


def _rows(first: int, count: int, width: int = 3) -> torch.Tensor:
    """Rows that carry their number: every value in row i is first + i."""
    return torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(count, width).contiguous()


def _hf(*tensors: torch.Tensor) -> tuple[HFTensor, ...]:
    return tuple(HFTensor(f"t{index}", tuple(tensor.shape)) for index, tensor in enumerate(tensors))


def _filled(mapping, sources, shard, rows, width=3):
    target = torch.full((rows, width), float("nan"))
    mapping.hf_to_megatron(target, sources, shard)
    return target[:, 0].tolist()


@pytest.mark.parametrize(
    ("shard", "expected"),
    [
        (TPShard(0, 1), [0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203]),
        (TPShard(0, 2), [0, 1, 2, 3, 100, 101, 200, 201]),
        (TPShard(1, 2), [4, 5, 6, 7, 102, 103, 202, 203]),
    ],
)
def test_grouped_qkv_interleaves_by_group(shard, expected):
    sources = [_rows(0, 8), _rows(100, 4), _rows(200, 4)]  # 2 groups of 2 queries, head size 2
    mapping = QKVMapping(_hf(*sources), num_groups=2)
    assert _filled(mapping, sources, shard, len(expected)) == expected


def test_gated_rows_give_each_rank_its_gate_then_its_up():
    sources = [_rows(0, 4), _rows(100, 4)]
    mapping = GatedMLPMapping(_hf(*sources))
    assert _filled(mapping, sources, TPShard(0, 2), 4) == [0, 1, 100, 101]
    assert _filled(mapping, sources, TPShard(1, 2), 4) == [2, 3, 102, 103]


@pytest.mark.parametrize(("rank", "expected"), [(0, [1, 2]), (1, [3, 4]), (2, [5, 0]), (3, [0, 0])])
def test_padded_rows_are_zero_where_the_vocabulary_ends(rank, expected):
    sources = [_rows(1, 5)]
    assert (
        _filled(VocabParallelMapping(_hf(*sources), padded_vocab_size=8), sources, TPShard(rank, 4), 2)
        == expected
    )


def test_columns_are_cut_along_the_input():
    source = torch.arange(8.0).view(2, 4)
    target = torch.empty(2, 2)
    RowParallelMapping(_hf(source)).hf_to_megatron(target, [source], TPShard(1, 2))
    assert target.tolist() == [[2, 3], [6, 7]]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("kind", "extra", "shapes", "local"),
    [
        (ReplicatedMapping, {}, [(6,)], lambda n: (6,)),
        (RowParallelMapping, {}, [(3, 8)], lambda n: (3, 8 // n)),
        (VocabParallelMapping, {"padded_vocab_size": 16}, [(13, 3)], lambda n: (16 // n, 3)),
        (GatedMLPMapping, {}, [(8, 3), (8, 3)], lambda n: (16 // n, 3)),
        (QKVMapping, {"num_groups": 4}, [(24, 3), (8, 3), (8, 3)], lambda n: (40 // n, 3)),
    ],
)
def test_taking_apart_undoes_filling_at_every_tp(kind, extra, shapes, local, size):
    sources = [_random(*shape) for shape in shapes]
    mapping = kind(_hf(*sources), **extra)
    shards = [torch.full(local(size), float("nan")) for _ in range(size)]
    for rank, shard in enumerate(shards):
        mapping.hf_to_megatron(shard, sources, TPShard(rank, size))
    back = mapping.megatron_to_hf(shards)
    assert all(torch.equal(tensor, source) for tensor, source in zip(back, sources, strict=True))


def test_filling_a_narrower_type_rounds_to_nearest_even():
    ties = torch.tensor([[1.0 + 2**-8, 1.0 + 3 * 2**-8]])  # halfway between two bfloat16 values
    target = torch.empty(1, 2, dtype=torch.bfloat16)
    VocabParallelMapping(_hf(ties), padded_vocab_size=1).hf_to_megatron(target, [ties], TPShard(0, 1))
    assert target.float().tolist() == [[1.0, 1.0 + 2**-6]]


def test_at_layer_names_the_layer():
    mapping = RowParallelMapping((HFTensor("model.layers.*.mlp.down_proj.weight", (2, 2)),)).at_layer(11)
    assert mapping.hf[0].name == "model.layers.11.mlp.down_proj.weight"
