"""Where each parameter lies in the flat buffer, and how the buffer is cut in buckets and shards.

Arithmetic only: no tensor is touched. Buckets follow the backward pass, so that the first bucket's
gradients are complete first; a bucket closes when it holds `bucket_size` elements, and is padded so that
every rank's shard of it has the same size. Inside a bucket parameters with weight decay come first,
so that a shard is at most a few pieces of one parameter group each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A shard's elements are a multiple of this, so that vector kernels and collectives start aligned.
ALIGNMENT = 64


class Item(NamedTuple):
    """One parameter to be placed."""

    numel: int
    group: int
    """Index of its parameter group: the order of groups inside a bucket."""
    is_alone: bool = False
    """In a bucket of its own (a tied embedding, which the first and last stage must cut alike)."""
    stage: int = 0
    """Which of the rank's pipeline stages it belongs to: each has its own backward, no bucket spans two."""


class Slot(NamedTuple):
    """A parameter's place: elements [begin, end) of the flat buffer."""

    parameter: int
    """Its index among the parameters."""
    begin: int
    end: int


@dataclass(frozen=True)
class BucketRange:
    """One bucket: elements [begin, end) of the flat buffer, padding at its end included."""

    begin: int
    end: int
    slots: tuple[Slot, ...]
    """The parameters in it, in the order of their elements."""
    stage: int = 0
    """Which of the rank's pipeline stages they belong to."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.end - self.begin

    def shard(self, rank: int, num_shards: int) -> tuple[int, int]:
        """The part [begin, end) of the flat buffer that belongs to one rank."""
        size = self.numel // num_shards
        return self.begin + rank * size, self.begin + (rank + 1) * size


def lay_out(items: Sequence[Item], bucket_size: int, num_shards: int) -> list[BucketRange]:
    """Cut parameters into buckets.

    Args:
        items: in the order in which backward completes their gradients.
        bucket_size: elements after which a bucket closes; a larger parameter is a bucket of its own.
        num_shards: data-parallel ranks that share a bucket.
    Returns:
        buckets in the order of `items`, without gaps; without items one, of padding alone.
    """
    unit = num_shards * ALIGNMENT
    if not items:  # a frozen stage still takes part in what its data-parallel ranks do together
        return [BucketRange(0, unit, ())]
    buckets: list[BucketRange] = []
    for members in _packed(items, bucket_size):
        begin = buckets[-1].end if buckets else 0
        slots, position = [], begin
        for index in sorted(members, key=lambda index: items[index].group):
            slots.append(Slot(index, position, position + items[index].numel))
            position += items[index].numel
        end = begin + -(-(position - begin) // unit) * unit
        buckets.append(BucketRange(begin, end, tuple(slots), items[members[0]].stage))
    return buckets


def _packed(items: Sequence[Item], bucket_size: int) -> list[list[int]]:
    """Indices of `items` by bucket; a bucket exceeds `bucket_size` only when one parameter does."""
    packed: list[list[int]] = []
    filled, open_stage = 0, None
    for index, item in enumerate(items):
        if item.stage != open_stage or item.is_alone or filled + item.numel > bucket_size:
            packed.append([])
            filled = 0
        packed[-1].append(index)
        filled += item.numel
        open_stage = None if item.is_alone else item.stage
    return packed


class Piece(NamedTuple):
    """Part of a parameter inside a shard."""

    parameter: int
    """Its index among the parameters."""
    begin: int
    """First element, counted in the flat buffer."""
    end: int
    offset: int
    """First element, counted in the parameter."""


def pieces(bucket: BucketRange, begin: int, end: int) -> list[Piece]:
    """The parameters' parts inside [begin, end) of the flat buffer, none of them empty."""
    found = []
    for slot in bucket.slots:
        first, last = max(slot.begin, begin), min(slot.end, end)
        if first < last:
            found.append(Piece(slot.parameter, first, last, first - slot.begin))
    return found
