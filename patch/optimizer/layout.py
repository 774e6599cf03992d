"""Where each parameter lies in the flat buffers, and how the buffers are cut in buckets and shards.

Arithmetic only: no tensor is touched. Buckets follow the backward pass, so that the first bucket's
gradients are complete first; a bucket closes when it holds `bucket_size` elements, and is padded so that
every rank's shard of it has the same size. Inside a bucket parameters with weight decay come first, so that
a shard is at most a few ranges of one parameter group each. Each domain (domain.py) has a flat buffer of its
own; the buckets of all of them are in one order. All records of ranges are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# A shard's elements are a multiple of this, so that vector kernels and collectives start aligned.
ALIGNMENT = 64


class ParamSpec(NamedTuple):
    """What the layout needs to know about one parameter."""

    numel: int
    group: int
    """Index of its parameter group: the order of groups inside a bucket."""
    is_alone: bool = False
    """In a bucket of its own (a tied embedding, which the first and last stage must cut alike)."""
    stage: int = 0
    """Which of the rank's pipeline stages it belongs to: each has its own backward, no bucket spans two."""
    domain: int = 0
    """Index of its domain, that is of its flat buffer: no bucket spans two."""


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
    """The parameters in it, whole, in the order of their elements."""
    stage: int = 0
    """Which of the rank's pipeline stages they belong to."""
    domain: int = 0
    """Index of their domain."""

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
                found.append(ParamRange(param.parameter, first, last, first - param.begin))
        return found


def lay_out(specs: Sequence[ParamSpec], bucket_size: int, num_shards: Sequence[int]) -> list[BucketRange]:
    """Cut parameters into buckets.

    Args:
        specs: in the order in which backward completes their gradients.
        bucket_size: elements after which a bucket closes; a larger parameter is a bucket of its own.
        num_shards: of each domain: data-parallel ranks that share a bucket.
    Returns:
        buckets in the order in which their last parameters are complete, in each domain without gaps; without
        parameters one, of padding alone.
    """
    if not specs:  # a frozen stage still takes part in what its data-parallel ranks do together
        return [BucketRange(0, num_shards[0] * ALIGNMENT, ())]
    buckets: list[BucketRange] = []
    ends = [0] * len(num_shards)
    for members in _packed(specs, bucket_size):
        last = specs[members[-1]]
        begin, unit = ends[last.domain], num_shards[last.domain] * ALIGNMENT
        params, position = [], begin
        for index in sorted(members, key=lambda index: specs[index].group):
            params.append(ParamRange(index, position, position + specs[index].numel))
            position += specs[index].numel
        end = ends[last.domain] = begin + -(-(position - begin) // unit) * unit
        buckets.append(BucketRange(begin, end, tuple(params), last.stage, last.domain))
    return buckets


def flat_numels(buckets: Sequence[BucketRange], num_domains: int) -> list[int]:
    """Elements of each domain's flat buffer."""
    return [max((b.end for b in buckets if b.domain == domain), default=0) for domain in range(num_domains)]


def _packed(specs: Sequence[ParamSpec], bucket_size: int) -> list[list[int]]:
    """Indices of `specs` by bucket; a bucket exceeds `bucket_size` only when one parameter does."""
    packed: list[list[int]] = []
    open_: dict[tuple[int, int], list[int]] = {}
    filled: dict[tuple[int, int], int] = {}
    for index, spec in enumerate(specs):
        place = spec.stage, spec.domain
        if place not in open_ or spec.is_alone or filled[place] + spec.numel > bucket_size:
            open_[place], filled[place] = [], 0
            packed.append(open_[place])
        open_[place].append(index)
        filled[place] += spec.numel
        if spec.is_alone:
            del open_[place]
    return sorted(packed, key=lambda members: members[-1])


class ShardRange(NamedTuple):
    """Neighbouring elements [begin, end) of a shard that are treated alike, counted in the shard."""

    begin: int
    end: int
    group: int
    """Index of the parameter group."""
    needs_extra_reduction: bool
    """Whether the gradient is summed over more ranks after the reduction of its bucket (over tensor-parallel
    ranks, or over the two stages of a tied embedding), so that it is not final before."""


class BucketShard(NamedTuple):
    """This rank's part of one bucket."""

    grad: torch.Tensor
    """(n,) the reduced gradient."""
    param: torch.Tensor
    """(n,) a view of the flat buffer of parameters."""
    ranges: list[ShardRange]
    """Its elements without padding."""
