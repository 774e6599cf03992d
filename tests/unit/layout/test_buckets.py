"""Places in the flat buffer: the arithmetic of buckets, shards and pieces, over many shapes."""

import random
from itertools import pairwise, product

import pytest

from patch.layout.buckets import ALIGNMENT, BucketRange, ParamSpec, flat_numels, lay_out

BUCKET_SIZES = (1, 7, 64, 1000, 5000, 10**9)
"""Of small models; the last one exceeds each of them."""
SHARDS = (1, 2, 3, 4, 8)
SMALLEST = 2**16
"""Elements of a bucket that is not worth to be smaller: small models have none as large."""


def random_specs(seed: int) -> list[ParamSpec]:
    """Up to 12 parameters of odd sizes in two groups, a few of them alone; every other model has 2 stages."""
    generator = random.Random(seed)
    numels = [generator.choice([1, 7, 31, 64, 513, 4096]) for _ in range(generator.randint(1, 12))]
    specs = [ParamSpec(numel, generator.randrange(2), generator.random() < 0.1) for numel in numels]
    first = generator.randrange(len(specs) + 1)
    return [spec._replace(stage=seed % 2 if index < first else 0) for index, spec in enumerate(specs)]


MODELS = [random_specs(seed) for seed in range(12)]
LARGE = [[spec._replace(numel=spec.numel * 1117) for spec in model] for model in MODELS]
"""Up to 4.6 million elements a parameter, which are cut in parts."""
CASES = [*product(MODELS, BUCKET_SIZES, SHARDS), *product(LARGE, (1, 10**5, 10**6, 10**9), (1, 3, 8))]


def check_bucket(bucket: BucketRange, specs: list[ParamSpec], bucket_size: int, num_shards: int) -> None:
    """What holds of each: no gaps, padding, size, equal aligned shards, one stage, groups in order."""
    unit, ends = num_shards * ALIGNMENT, [param.end for param in bucket.params]
    assert [param.begin for param in bucket.params] == [bucket.begin, *ends[:-1]]
    assert bucket.numel == -(-(ends[-1] - bucket.begin) // unit) * unit
    assert len(bucket.params) == 1 or ends[-1] - bucket.begin <= bucket_size
    assert bucket.numel < max(bucket_size, SMALLEST) + unit
    shards = [bucket.shard(rank, num_shards) for rank in range(num_shards)]
    assert (shards[0][0], shards[-1][1]) == (bucket.begin, bucket.end)
    assert all(before[1] == after[0] for before, after in pairwise(shards))
    assert {end - begin for begin, end in shards} == {bucket.numel // num_shards}
    assert all(begin % ALIGNMENT == 0 for begin, _ in shards)
    own = [specs[param.parameter] for param in bucket.params]
    assert {spec.stage for spec in own} == {bucket.stage}
    assert len(own) == 1 or not any(spec.has_own_bucket for spec in own)
    keys = [(specs[param.parameter].group, param.parameter) for param in bucket.params]
    assert keys == sorted(keys)


def test_buckets_cover_all_elements_once_in_the_order_of_backward() -> None:
    for specs, bucket_size, num_shards in CASES:
        buckets = lay_out(specs, bucket_size, [num_shards])
        assert buckets[0].begin == 0 and all(b.end == a.begin for b, a in pairwise(buckets))
        seen = [0] * len(specs)
        for bucket in buckets:
            check_bucket(bucket, specs, bucket_size, num_shards)
            for param in sorted(bucket.params):
                assert param.offset == seen[param.parameter]
                shards = (bucket.shard(rank, num_shards) for rank in range(num_shards))
                pieces = [piece for shard in shards for piece in bucket.params_within(*shard)]
                for piece in (piece for piece in pieces if piece.parameter == param.parameter):
                    assert piece.begin < piece.end and piece.offset == seen[param.parameter]
                    assert piece.begin - piece.offset == param.begin - param.offset
                    seen[param.parameter] += piece.end - piece.begin
        assert seen == [spec.numel for spec in specs]
        order = [param.parameter for bucket in buckets for param in sorted(bucket.params)]
        assert list(dict.fromkeys(order)) == [*range(len(specs))]


def test_a_bucket_of_small_parameters_closes_only_when_it_must() -> None:
    for specs, bucket_size, num_shards in product(MODELS, BUCKET_SIZES, SHARDS):
        buckets = lay_out(specs, bucket_size, [num_shards])
        assert sum(len(bucket.params) for bucket in buckets) == len(specs)  # none is cut
        for before, after in pairwise(buckets):
            first = min(param.parameter for param in after.params)
            has_own_bucket = specs[first].has_own_bucket or specs[before.params[0].parameter].has_own_bucket
            filled = before.params[-1].end - before.begin
            assert has_own_bucket or before.stage != after.stage or filled + specs[first].numel > bucket_size


def test_a_parameter_of_no_elements_has_a_place() -> None:
    for specs in ([0], [10, 0], [200_000, 0, 400_000, 0]):
        buckets = lay_out([ParamSpec(numel, 0) for numel in specs], 1000, [2])
        assert {param.parameter for bucket in buckets for param in bucket.params} == {*range(len(specs))}


def test_domains_have_buffers_of_their_own_and_one_order_of_buckets() -> None:
    generator = random.Random(0)
    for specs, bucket_size, num_shards in product(MODELS, BUCKET_SIZES, SHARDS):
        mixed = [spec._replace(buffer_group=generator.randrange(3)) for spec in specs]
        shares = [num_shards, 1, 2 * num_shards]
        buckets = lay_out(mixed, bucket_size, shares)
        for buffer_group in range(3):
            # Each domain is laid out as if it were the whole model.
            indices = [index for index, spec in enumerate(mixed) if spec.buffer_group == buffer_group]
            own = [mixed[index]._replace(buffer_group=0) for index in indices]
            alone = lay_out(own, bucket_size, [shares[buffer_group]])
            own = [bucket for bucket in buckets if bucket.buffer_group == buffer_group]
            if indices:
                assert [(b.begin, b.end, b.stage) for b in own] == [(b.begin, b.end, b.stage) for b in alone]
                places = [[(indices[p.parameter], *p[1:]) for p in b.params] for b in alone]
                assert [[tuple(p) for p in b.params] for b in own] == places
            assert flat_numels(buckets, 3)[buffer_group] == (own[-1].end if own else 0)
        completed = [max(param.parameter for param in bucket.params) for bucket in buckets]
        assert completed == sorted(completed)


def test_padded_buckets_are_multiples_of_the_large_power_and_their_shards_equal() -> None:
    for specs, num_shards in product(LARGE, (1, 3, 8)):
        padded = lay_out(specs, 10**6, [num_shards], is_padded=True)
        assert all(bucket.numel % 2**16 == bucket.numel % num_shards == 0 for bucket in padded)
        places = {p.parameter: p.begin for b in padded for p in b.params if p.offset == 0}
        assert sorted(places) == list(range(len(specs)))


def test_the_end_of_backward_is_tapered() -> None:
    """Layers of 20 x 2**18 elements, then an embedding of 2**22."""
    layers = [ParamSpec(2**18, 0)] * 20
    sizes = [bucket.numel for bucket in lay_out([*layers, ParamSpec(2**22, 0)], 2**21, [8])]
    of_layers, of_embedding = sizes[:-6], sizes[-6:]
    assert of_layers == [8 * 2**18, 6 * 2**18, 3 * 2**18, 2**18, 2**18, 2**18]
    assert of_embedding == [2**21, 2**20, 2**19, 2**18, 2**17, 2**17]


def test_among_many_ranks_the_taper_is_shorter() -> None:
    """Its smallest bucket is 1/16 up to 128 ranks, 1/4 among 512, and a whole one from 2048."""
    layers = [ParamSpec(2**20, 0)] * 64
    smallest = {
        ranks: min(bucket.numel for bucket in lay_out([*layers, ParamSpec(2**26, 0)], 2**24, [ranks]))
        for ranks in (2, 128, 512, 2048, 8192)
    }
    assert smallest == {2: 2**20, 128: 2**20, 512: 2**22, 2048: 2**24, 8192: 2**24}


def test_a_tied_embedding_is_cut_alike_wherever_it_comes() -> None:
    tied, layers = ParamSpec(3_000_001, 0, has_own_bucket=True), [ParamSpec(2**18, 0)] * 20
    first_stage, last_stage = (
        [[(p.offset, p.end - p.begin) for b in lay_out(specs, 2**20, [4]) for p in b.params
          if specs[p.parameter].has_own_bucket] for specs in ([*layers, tied], [tied, *layers])]
    )  # fmt: skip
    assert first_stage == last_stage and len(first_stage) > 3


@pytest.mark.parametrize("bucket_size", [*range(100, 700, 50), 10**9])
def test_of_a_series_nothing_but_padding_lies_between_two(bucket_size: int) -> None:
    """Two layers: each has experts of two matrices, a norm and an attention; a last norm comes first."""
    experts = [ParamSpec(size, 0, contiguous_with=1) for size in 4 * (64, 128)]
    of_layer = [*experts, ParamSpec(64, 1), ParamSpec(192, 0)]
    specs = [
        ParamSpec(64, 1),
        *of_layer,
        *(spec._replace(contiguous_with=2 * spec.contiguous_with) for spec in of_layer),
    ]
    params = [param for bucket in lay_out(specs, bucket_size, [1]) for param in bucket.params]
    for contiguous_with in (1, 2):
        own = [param for param in params if specs[param.parameter].contiguous_with == contiguous_with]
        assert [param.parameter for param in own] == sorted(param.parameter for param in own)
        assert all(after.begin == before.end for before, after in pairwise(own)), own
