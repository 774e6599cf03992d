"""Places in the flat buffer: the arithmetic of buckets, shards and pieces, over many shapes."""

import random
from itertools import pairwise, product

import pytest

from patch.layout.buckets import ALIGNMENT, BucketRange, ParamSpec, flat_numels, lay_out

# The last bucket size exceeds every model here.
BUCKET_SIZES = (1, 7, 64, 1000, 5000, 10**9)
SHARDS = (1, 2, 3, 4, 8)


def random_specs(seed: int) -> list[ParamSpec]:
    """Up to 12 parameters of odd sizes in two groups, a few of them alone; every other model has 2 stages."""
    generator = random.Random(seed)
    specs = [
        ParamSpec(
            generator.choice([1, 7, 31, 64, 513, 4096]), generator.randrange(2), generator.random() < 0.1
        )
        for _ in range(generator.randint(1, 12))
    ]
    first = generator.randrange(len(specs) + 1)
    return [spec._replace(stage=seed % 2 if index < first else 0) for index, spec in enumerate(specs)]


MODELS = [random_specs(seed) for seed in range(12)]
EVERY = list(product(range(len(MODELS)), BUCKET_SIZES, SHARDS))
SMALLEST = 2**16
"""Elements of a bucket that is not worth to be smaller: models above have none as large."""
LARGE = [[spec._replace(numel=spec.numel * 1117) for spec in model] for model in MODELS]
"""Up to 4.6 million elements a parameter."""


def laid_out(model: int, bucket_size: int, num_shards: int) -> tuple[list[ParamSpec], list[BucketRange]]:
    return MODELS[model], lay_out(MODELS[model], bucket_size, [num_shards])


def test_every_parameter_has_one_place_of_its_size() -> None:
    for case in EVERY:
        specs, buckets = laid_out(*case)
        places = {param.parameter: param.end - param.begin for bucket in buckets for param in bucket.params}
        assert places == {index: spec.numel for index, spec in enumerate(specs)}, case
        assert sum(len(bucket.params) for bucket in buckets) == len(specs), case


def test_a_parameter_of_no_elements_has_a_place() -> None:
    for specs in ([0], [10, 0], [200_000, 0, 400_000, 0]):
        buckets = lay_out([ParamSpec(numel, 0) for numel in specs], 1000, [2])
        places = [param.parameter for bucket in buckets for param in bucket.params]
        assert sorted(set(places)) == list(range(len(specs)))


def test_buckets_and_parameters_follow_each_other_without_gaps() -> None:
    for case in EVERY:
        _, buckets = laid_out(*case)
        assert buckets[0].begin == 0
        assert all(before.end == after.begin for before, after in pairwise(buckets)), case
        for bucket in buckets:
            begins = [param.begin for param in bucket.params]
            assert begins == [bucket.begin, *(param.end for param in bucket.params[:-1])], case


def test_padding_is_less_than_one_unit_and_only_at_the_end_of_a_bucket() -> None:
    for case in EVERY:
        _, buckets = laid_out(*case)
        for bucket in buckets:
            assert 0 <= bucket.end - bucket.params[-1].end < case[2] * ALIGNMENT, case


def test_shards_are_equal_aligned_and_cover_their_bucket() -> None:
    for case in EVERY:
        _, buckets = laid_out(*case)
        for bucket in buckets:
            shards = [bucket.shard(rank, case[2]) for rank in range(case[2])]
            assert shards[0][0] == bucket.begin and shards[-1][1] == bucket.end
            assert all(before[1] == after[0] for before, after in pairwise(shards)), case
            assert {end - begin for begin, end in shards} == {bucket.numel // case[2]}
            assert all(begin % ALIGNMENT == 0 for begin, _ in shards), case


def test_buckets_follow_the_order_of_backward() -> None:
    for case in EVERY:
        _, buckets = laid_out(*case)
        members = [sorted(param.parameter for param in bucket.params) for bucket in buckets]
        assert sum(members, []) == list(range(len(MODELS[case[0]]))), case


def test_a_bucket_exceeds_its_size_only_for_one_parameter_and_closes_only_when_it_must() -> None:
    for case in EVERY:
        specs, buckets = laid_out(*case)
        for bucket in buckets:
            assert len(bucket.params) == 1 or sum(s.end - s.begin for s in bucket.params) <= case[1], case
        for before, after in pairwise(buckets):
            first = min(param.parameter for param in after.params)
            is_alone = specs[first].is_alone or specs[before.params[0].parameter].is_alone
            filled = sum(param.end - param.begin for param in before.params)
            must = is_alone or before.stage != after.stage
            assert must or filled + specs[first].numel > case[1], case


def test_a_tied_embedding_is_alone_in_its_bucket() -> None:
    for case in EVERY:
        specs, buckets = laid_out(*case)
        for bucket in buckets:
            assert len(bucket.params) == 1 or not any(
                specs[param.parameter].is_alone for param in bucket.params
            )


def test_a_bucket_belongs_to_one_stage() -> None:
    for case in EVERY:
        specs, buckets = laid_out(*case)
        for bucket in buckets:
            assert {specs[param.parameter].stage for param in bucket.params} == {bucket.stage}, case


def test_groups_are_in_order_inside_a_bucket() -> None:
    for case in EVERY:
        specs, buckets = laid_out(*case)
        for bucket in buckets:
            keys = [(specs[param.parameter].group, param.parameter) for param in bucket.params]
            assert keys == sorted(keys), case


def test_pieces_of_all_shards_are_every_element_of_every_parameter_once() -> None:
    for case in EVERY:
        specs, buckets = laid_out(*case)
        seen: dict[int, list[int]] = {index: [] for index in range(len(specs))}
        for bucket in buckets:
            for rank in range(case[2]):
                begin, end = bucket.shard(rank, case[2])
                for part in bucket.params_within(begin, end):
                    assert begin <= part.begin < part.end <= end
                    (param,) = (param for param in bucket.params if param.parameter == part.parameter)
                    assert part.begin == param.begin + part.offset
                    seen[part.parameter] += range(part.offset, part.offset + part.end - part.begin)
        assert all(seen[index] == list(range(spec.numel)) for index, spec in enumerate(specs)), case


def test_domains_have_buffers_of_their_own_and_one_order_of_buckets() -> None:
    generator = random.Random(0)
    for specs, bucket_size, num_shards in product(MODELS, BUCKET_SIZES, SHARDS):
        mixed = [spec._replace(domain=generator.randrange(3)) for spec in specs]
        shares = [num_shards, 1, 2 * num_shards]
        buckets = lay_out(mixed, bucket_size, shares)
        for domain in range(3):
            # Each domain is laid out as if it were the whole model.
            indices = [index for index, spec in enumerate(mixed) if spec.domain == domain]
            alone = lay_out(
                [mixed[index]._replace(domain=0) for index in indices], bucket_size, [shares[domain]]
            )
            own = [bucket for bucket in buckets if bucket.domain == domain]
            if indices:
                assert [(b.begin, b.end, b.stage) for b in own] == [(b.begin, b.end, b.stage) for b in alone]
                places = [[(indices[p.parameter], *p[1:]) for p in b.params] for b in alone]
                assert [[tuple(p) for p in b.params] for b in own] == places
            assert flat_numels(buckets, 3)[domain] == (own[-1].end if own else 0)
        completed = [max(param.parameter for param in bucket.params) for bucket in buckets]
        assert completed == sorted(completed)


def test_parts_of_large_parameters_follow_each_other_in_equal_aligned_shards() -> None:
    for specs, bucket_size, num_shards in product(LARGE, (1, 10**5, 10**6, 10**9), (1, 3, 8)):
        buckets, unit = lay_out(specs, bucket_size, [num_shards]), num_shards * ALIGNMENT
        assert buckets[0].begin == 0 and all(b.end == a.begin for b, a in pairwise(buckets))
        found: dict[int, list] = {}
        for bucket in buckets:
            filled = bucket.params[-1].end - bucket.begin
            assert bucket.params[0].begin == bucket.begin and bucket.numel == -(-filled // unit) * unit
            assert all(p.begin == before.end for before, p in pairwise(bucket.params))
            for param in bucket.params:
                found.setdefault(param.parameter, []).append(param)
            shards = [bucket.params_within(*bucket.shard(rank, num_shards)) for rank in range(num_shards)]
            first = bucket.params[0]
            cut = [part for shard in shards for part in shard if part.parameter == first.parameter]
            assert cut[0].offset == first.offset
            assert all(a.offset == b.offset + b.end - b.begin for b, a in pairwise(cut))
        for index, parts in found.items():
            assert parts[0].offset == 0 and sum(p.end - p.begin for p in parts) == specs[index].numel
            assert all(
                a.begin == b.end and a.offset == b.offset + b.end - b.begin for b, a in pairwise(parts)
            )
        assert list(dict.fromkeys(p.parameter for b in buckets for p in sorted(b.params))) == [
            *range(len(specs))
        ]


def test_no_bucket_is_larger_than_its_size_or_the_smallest() -> None:
    for specs, bucket_size, num_shards in product(LARGE, (1, 10**5, 10**6, 10**9), (1, 3, 8)):
        for bucket in lay_out(specs, bucket_size, [num_shards]):
            assert bucket.numel < max(bucket_size, SMALLEST) + num_shards * ALIGNMENT


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
    tied, layers = ParamSpec(3_000_001, 0, is_alone=True), [ParamSpec(2**18, 0)] * 20
    first_stage, last_stage = (
        [[(p.offset, p.end - p.begin) for b in lay_out(specs, 2**20, [4]) for p in b.params
          if specs[p.parameter].is_alone] for specs in ([*layers, tied], [tied, *layers])]
    )  # fmt: skip
    assert first_stage == last_stage and len(first_stage) > 3


@pytest.mark.parametrize("bucket_size,expected", [(1, 3), (10, 3), (14, 2), (21, 1), (10**9, 1)])
def test_number_of_buckets(bucket_size: int, expected: int) -> None:
    assert len(lay_out([ParamSpec(7, 0), ParamSpec(7, 1), ParamSpec(7, 0)], bucket_size, [4])) == expected


def test_seven_elements_over_four_ranks_are_one_padded_bucket() -> None:
    (bucket,) = lay_out([ParamSpec(7, 0)], 1, [4])
    assert (bucket.numel, bucket.shard(3, 4)) == (4 * ALIGNMENT, (3 * ALIGNMENT, 4 * ALIGNMENT))
    assert bucket.params_within(*bucket.shard(1, 4)) == []
