"""Where each parameter lies in the flat buffers, and how the buffers are cut in buckets and shards.

Arithmetic only: no tensor is touched. Buckets follow the backward pass, so that the first bucket's
gradients are complete first; a bucket closes when it holds `bucket_size` elements, and is padded so that
every rank's shard of it has the same size. Inside a bucket parameters with weight decay come first, so that
a shard is at most a few ranges of one parameter group each; but a series that goes on in the next bucket (a
layer's experts, whose matrices are to lie at equal distances) comes last. Each domain (optimizer/domain.py)
has a flat buffer of its own; the buckets of all of them are in one order.

Buckets are tapered: no compute hides the messages of those that backward completes last, and the next
forward needs them first. So a bucket has at most half of the elements that are left, down to a smallest
size; among thousands of ranks all have the same size. The last gradient, mostly that of the embedding, comes
at once; it is cut in buckets whose sizes halve, so that the smaller ones are summed, updated and gathered
while the larger ones travel. Any other parameter that is larger than a bucket is cut in equal parts, so that
no staging buffer is larger than a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A shard's elements are a multiple of this, so that vector kernels and collectives start aligned.
ALIGNMENT = 64
_NCCL_ALIGNMENT = 2**16
"""NCCL's rings have their full bandwidth at messages that a large power of 2 divides, upstream says."""
_SMALLEST_NUMEL = 2**16
"""Elements of a bucket below which its messages cost their latency, whatever their size."""
_SMALLEST_SHARE, _LONG_RING = 16, 128
"""A tapered bucket has at least 1/16 of `bucket_size`; among more than 128 ranks a share that grows with
them, because every bucket costs a message its latency for each (toolkits/benchmarks/RESULTS.md)."""

NUM_STAGING = 3
"""Staging buffers of ZeRO-2: one filling, one travelling, one for gradients that come before the last of the
bucket before. At ZeRO-3 the third is for what stays whole, and no larger."""
NUM_WHOLE = 2
"""Units of weights that are whole at once if replicas shard them: one computes, the next is gathered."""
MAX_TRAVELLING = 4
"""Reductions that a CPU lets travel while backward goes on: each holds memory for what it receives, a
bucket less the own part. From 2 to all of them a step takes equally long (toolkits/benchmarks/RESULTS.md)."""
ROUNDED_UNDER_WAY = 2
"""Messages of rounded gradients over NCCL: one is sent while another is rounded, or added up."""


class ParamSpec(NamedTuple):
    """A parameter, as the layout of buckets needs to know it."""

    numel: int
    group: int
    """Index of its parameter group: the order of groups inside a bucket."""
    is_alone: bool = False
    """In buckets of its own (a tied embedding, which the first and last stage must cut alike)."""
    stage: int = 0
    """Which of the rank's pipeline stages it belongs to: each has its own backward, no bucket spans two."""
    domain: int = 0
    """Index of its domain, that is of its flat buffer: no bucket spans two."""
    series: int = 0
    """Not 0: of those with this number nothing but a bucket's padding lies between two."""
    unit: int = 0
    """The unit that is gathered and freed together: no bucket spans two. 0: parameters that stay whole."""


class ParamRange(NamedTuple):
    """Elements of one parameter, and where they lie in its flat buffer: [begin, end)."""

    parameter: int
    """Its index among the parameters."""
    begin: int
    end: int
    offset: int = 0
    """Index of the first of these elements in the flattened parameter; 0 for a whole parameter."""


@dataclass(frozen=True)
class BucketRange:
    """One bucket: elements [begin, end) of its domain's flat buffer, padding at its end included."""

    begin: int
    end: int
    params: tuple[ParamRange, ...]
    """The parameters in it, in the order of their elements: whole ones, or a part of a single one. All parts
    of a parameter follow each other without gaps."""
    stage: int = 0
    """Which of the rank's pipeline stages they belong to."""
    domain: int = 0
    """Index of their domain."""
    unit: int = 0
    """The unit with which they are gathered and freed; 0: they stay whole."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.end - self.begin

    def shard(self, rank: int, num_shards: int) -> tuple[int, int]:
        """The part [begin, end) of the flat buffer that belongs to one rank."""
        size = self.numel // num_shards
        return self.begin + rank * size, self.begin + (rank + 1) * size

    def params_within(self, begin: int, end: int) -> list[ParamRange]:
        """The parameters' parts inside [begin, end) of the flat buffer, none of them empty."""
        found = []
        for param in self.params:
            first, last = max(param.begin, begin), min(param.end, end)
            if first < last:
                found.append(ParamRange(param.parameter, first, last, param.offset + first - param.begin))
        return found


def lay_out(
    specs: Sequence[ParamSpec], bucket_size: int, num_shards: Sequence[int], *, is_padded: bool = False
) -> list[BucketRange]:
    """Cut parameters into buckets.

    Args:
        specs: in the order in which backward completes their gradients.
        bucket_size: elements after which a bucket closes.
        num_shards: of each domain: data-parallel ranks that share a bucket.
        is_padded: a bucket is a multiple of 2**16 elements, as upstream's pad_buckets_for_high_nccl_busbw.
    Returns:
        buckets in the order in which their last parameters are complete, in each domain without gaps; without
        parameters one, of padding alone.
    """
    if not specs:  # a frozen stage still takes part in what its data-parallel ranks do together
        return [BucketRange(0, num_shards[0] * ALIGNMENT, ())]
    buckets: list[BucketRange] = []
    units = [math.lcm(shards * ALIGNMENT, _NCCL_ALIGNMENT if is_padded else 1) for shards in num_shards]
    ends = [0] * len(num_shards)
    smallest = [smallest_bucket(bucket_size, shards) for shards in num_shards]
    for parts in _packed(specs, bucket_size, units, smallest):
        last = specs[parts[-1].parameter]
        begin, unit = ends[last.domain], units[last.domain]
        params, position = [], begin
        for part in sorted(parts, key=lambda part: _place(specs[part.parameter], last)):
            params.append(ParamRange(part.parameter, position, position + part.numel, part.offset))
            position += part.numel
        end = ends[last.domain] = begin + -(-(position - begin) // unit) * unit
        buckets.append(BucketRange(begin, end, tuple(params), last.stage, last.domain, last.unit))
    return buckets


def _place(spec: ParamSpec, last: ParamSpec) -> tuple[bool, int]:
    """Where in its bucket a parameter belongs; the last one to be complete may be of a series."""
    return last.series > 0 and spec.series == last.series, spec.group


def flat_numels(buckets: Sequence[BucketRange], num_domains: int) -> list[int]:
    """Elements of each domain's flat buffer."""
    return [max((b.end for b in buckets if b.domain == domain), default=0) for domain in range(num_domains)]


class _Part(NamedTuple):
    """Elements of one parameter that are to lie in one bucket."""

    parameter: int
    offset: int
    numel: int


def _packed(
    specs: Sequence[ParamSpec], bucket_size: int, units: Sequence[int], smallest_sizes: Sequence[int]
) -> list[list[_Part]]:
    """Parts of parameters by bucket; only a whole parameter in the taper exceeds its bucket's size."""
    packed: list[list[_Part]] = []
    open_: dict[tuple[int, int, int], list[_Part]] = {}
    room: dict[tuple[int, int, int], int] = {}
    last = {spec.domain: index for index, spec in enumerate(specs)}
    # The last gradient of a domain comes with the one before it, so nothing hides it: it is not counted.
    left = {domain: -specs[index].numel for domain, index in last.items()}
    for spec in specs:
        left[spec.domain] += spec.numel
    for index, spec in enumerate(specs):
        place, unit = (spec.stage, spec.domain, spec.unit), units[spec.domain]
        smallest = max(smallest_sizes[spec.domain], unit)
        is_tapered = spec.is_alone or index == last[spec.domain]
        parts = list(_cut(index, spec.numel, bucket_size, unit, smallest, is_tapered=is_tapered))
        parts = parts or [_Part(index, 0, 0)]
        is_first = place not in open_ or room[place] < spec.numel
        if spec.is_alone or len(parts) > 1:
            packed += [[part] for part in parts]
            open_.pop(place, None)
        else:
            if is_first:
                open_[place], room[place] = [], min(bucket_size, max(left[spec.domain] // 2, smallest))
                packed.append(open_[place])
            open_[place] += parts
            room[place] -= spec.numel
        left[spec.domain] -= spec.numel
    return sorted(packed, key=lambda parts: parts[-1].parameter)


def smallest_bucket(bucket_size: int, num_shards: int) -> int:
    """Elements of the smallest bucket of a taper.

    Args:
        bucket_size: of the largest one.
        num_shards: data-parallel ranks that share a bucket.
    """
    smallest = bucket_size * max(num_shards, _LONG_RING) // (_LONG_RING * _SMALLEST_SHARE)
    return max(min(smallest, bucket_size), _SMALLEST_NUMEL)


def _cut(
    index: int, numel: int, bucket_size: int, unit: int, smallest: int, *, is_tapered: bool
) -> Iterator[_Part]:
    """A parameter in parts that are multiples of `unit`, but for the last one.

    None exceeds a bucket, or the smallest one of a taper if that is larger, by a unit or more.

    They depend on the parameter's size and on what is equal on all ranks, because two stages must cut a tied
    embedding alike.

    Args:
        is_tapered: each part is at most half of what is left; else parts are about equal.
    """
    largest, offset = max(bucket_size, smallest), 0
    while offset < numel:
        left = numel - offset
        if is_tapered and left >= 2 * smallest:
            size = min(left // 2, largest) // unit * unit
        else:
            size = min(left, -(-left // (-(-left // largest) * unit)) * unit)
        yield _Part(index, offset, size)
        offset += size
