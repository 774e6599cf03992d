"""Positions of the parameters in the flat buffers, and the cut of the buffers into buckets and shards.

Arithmetic only: no tensor is touched. Buckets follow the backward pass, so the gradients of the first bucket
are complete first. A bucket closes when it holds `bucket_size` elements. It is padded so that all ranks have
shards of the same size. Inside a bucket, parameters with weight decay come first, so a shard has few ranges,
each of one parameter group. A series that continues in the next bucket comes last (a layer's experts, whose
matrices must lie at equal distances). Each buffer group (optimizer/buckets/buffer_group.py) has its own flat
buffer. The buckets of all buffer groups share one order.

Buckets are tapered: no compute hides the messages of the buckets that backward completes last, and the next
forward needs their weights first. So a bucket has at most half of the remaining elements, down to a smallest
size. With thousands of ranks all buckets have the same size. The last gradient, mostly of the embedding, is
complete at once. It is cut into buckets of halving sizes, so that the smaller buckets are summed, updated and
gathered while the larger ones are in flight. Any other parameter that is larger than a bucket is cut into
equal parts, so no staging buffer exceeds a bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A shard's elements are a multiple of this, so that vector kernels and collectives start aligned.
ALIGNMENT = 64
_NCCL_ALIGNMENT = 2**16
"""Divisor of the messages at which NCCL's rings have their full bandwidth, according to upstream."""
_SMALLEST_NUMEL = 2**16
"""Elements of a bucket below which a message costs only its latency."""
_SMALLEST_SHARE, _LONG_RING = 16, 128
"""Smallest tapered bucket: 1/16 of `bucket_size`. With more than 128 ranks this share grows with the ranks,
because each bucket costs a message's latency per rank (toolkits/benchmarks/RESULTS.md)."""

NUM_STAGING = 3
"""Staging buffers of ZeRO-2: one filling, one in flight, one for gradients that arrive before the previous
bucket is complete. With ZeRO-3 the third is for parameters that stay whole, and no larger than their
bucket."""
NUM_GATHERED_UNITS = 2
"""Units whose weights are whole at once with ZeRO-3: one computes, the next is being gathered."""
NUM_STREAMED = 3
"""Chunks of streamed states with a buffer on the device: one is copied there, one is updated, one is copied
back."""
CHUNK_UNITS = range(1, 5)
"""The sizes of a chunk that are tried, in units of `chunk_unit`."""
MAX_IN_FLIGHT = 4
"""Reductions that a CPU keeps in flight during backward. Each holds memory for what it receives: a bucket
less the rank's own part. Step time is the same from 2 to all of them (toolkits/benchmarks/RESULTS.md)."""
NUM_BF16_SENDS_IN_FLIGHT = 2
"""Messages of rounded gradients over NCCL: one is sent while another is rounded or summed."""


def chunk_unit(numel: int) -> int:
    """Return the smallest size of a chunk, in elements, if a rank has the states of `numel` elements."""
    return min(32 << 20, max(1, -(-numel // 64)))


class ParamSpec(NamedTuple):
    """The facts about a parameter that the layout of buckets needs."""

    numel: int
    group: int
    """Index of the parameter group; it orders the parameters inside a bucket."""
    has_own_bucket: bool = False
    """Whether it has its own buckets (a tied embedding, which two stages must cut alike)."""
    stage: int = 0
    """Index among the rank's pipeline stages. Each stage has its own backward, and no bucket spans two."""
    buffer_group: int = 0
    """Index of the buffer group and its flat buffer; no bucket spans two."""
    contiguous_with: int = 0
    """Number of its series, or 0 if none. Only bucket padding may lie between parameters of one series."""
    unit: int = 0
    """Number of the unit (FSDP), or 0 if the parameter stays whole. No bucket spans two units."""


class ParamRange(NamedTuple):
    """Elements of one parameter, and their position [begin, end) in the flat buffer."""

    parameter: int
    begin: int
    end: int
    offset: int = 0
    """Index of the first element in the flattened parameter; 0 for a whole parameter."""


@dataclass(frozen=True)
class BucketRange:
    """One bucket: elements [begin, end) of the flat buffer of a buffer group, padding at the end included."""

    begin: int
    end: int
    params: tuple[ParamRange, ...]
    """Whole parameters or one part of a single parameter, in the order of their elements. All parts of a
    parameter follow each other without gaps."""
    stage: int = 0
    buffer_group: int = 0
    unit: int = 0
    """Unit that is gathered and freed together, or 0 if the parameters stay whole."""

    @property
    def numel(self) -> int:
        """Elements, padding included."""
        return self.end - self.begin

    def shard(self, rank: int, num_shards: int) -> tuple[int, int]:
        """Return the part [begin, end) of the flat buffer that belongs to one rank."""
        size = self.numel // num_shards
        return self.begin + rank * size, self.begin + (rank + 1) * size

    def params_within(self, begin: int, end: int) -> list[ParamRange]:
        """Return the non-empty parts of parameters inside [begin, end) of the flat buffer."""
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
        specs: in the order in which backward completes the gradients.
        bucket_size: elements after which a bucket closes.
        num_shards: per buffer group, the data-parallel ranks that share a bucket.
        is_padded: pad buckets to multiples of 2**16 elements, as upstream's pad_buckets_for_high_nccl_busbw.
    Returns:
        buckets in the order in which their last parameters are complete, without gaps in each buffer group.
        If there are no parameters, one bucket of padding.
    """
    if not specs:  # a frozen stage still takes part in the collectives of its data-parallel group
        return [BucketRange(0, num_shards[0] * ALIGNMENT, ())]
    buckets: list[BucketRange] = []
    units = [math.lcm(shards * ALIGNMENT, _NCCL_ALIGNMENT if is_padded else 1) for shards in num_shards]
    ends = [0] * len(num_shards)
    smallest = [smallest_bucket(bucket_size, shards) for shards in num_shards]
    for parts in _packed(specs, bucket_size, units, smallest):
        last = specs[parts[-1].parameter]
        begin, unit = ends[last.buffer_group], units[last.buffer_group]
        params, position = [], begin
        for part in sorted(parts, key=lambda part: _place(specs[part.parameter], last)):
            params.append(ParamRange(part.parameter, position, position + part.numel, part.offset))
            position += part.numel
        end = ends[last.buffer_group] = begin + -(-(position - begin) // unit) * unit
        buckets.append(BucketRange(begin, end, tuple(params), last.stage, last.buffer_group, last.unit))
    return buckets


def _place(spec: ParamSpec, last: ParamSpec) -> tuple[bool, int]:
    """Sort key inside a bucket: a series of the bucket's last parameter goes to the end."""
    return last.contiguous_with > 0 and spec.contiguous_with == last.contiguous_with, spec.group


def flat_numels(buckets: Sequence[BucketRange], num_buffer_groups: int) -> list[int]:
    """Return the elements of each buffer group's flat buffer."""
    return [
        max((b.end for b in buckets if b.buffer_group == buffer_group), default=0)
        for buffer_group in range(num_buffer_groups)
    ]


class _Part(NamedTuple):
    parameter: int
    offset: int
    numel: int


def _packed(
    specs: Sequence[ParamSpec], bucket_size: int, units: Sequence[int], smallest_sizes: Sequence[int]
) -> list[list[_Part]]:
    """Parts of parameters by bucket; only a whole parameter in the taper exceeds its bucket."""
    packed: list[list[_Part]] = []
    open_: dict[tuple[int, int, int], list[_Part]] = {}
    room: dict[tuple[int, int, int], int] = {}
    last = {spec.buffer_group: index for index, spec in enumerate(specs)}
    # Nothing hides the last gradient of a buffer group, so it is not counted.
    left = {buffer_group: -specs[index].numel for buffer_group, index in last.items()}
    for spec in specs:
        left[spec.buffer_group] += spec.numel
    for index, spec in enumerate(specs):
        place, unit = (spec.stage, spec.buffer_group, spec.unit), units[spec.buffer_group]
        smallest = max(smallest_sizes[spec.buffer_group], unit)
        is_tapered = spec.has_own_bucket or index == last[spec.buffer_group]
        parts = list(_cut(index, spec.numel, bucket_size, unit, smallest, is_tapered=is_tapered))
        parts = parts or [_Part(index, 0, 0)]
        is_first = place not in open_ or room[place] < spec.numel
        if spec.has_own_bucket or len(parts) > 1:
            packed += [[part] for part in parts]
            open_.pop(place, None)
        else:
            if is_first:
                open_[place], room[place] = [], min(bucket_size, max(left[spec.buffer_group] // 2, smallest))
                packed.append(open_[place])
            open_[place] += parts
            room[place] -= spec.numel
        left[spec.buffer_group] -= spec.numel
    return sorted(packed, key=lambda parts: parts[-1].parameter)


def smallest_bucket(bucket_size: int, num_shards: int) -> int:
    """Return the elements of the smallest bucket of a taper, shared by `num_shards` data-parallel ranks."""
    smallest = bucket_size * max(num_shards, _LONG_RING) // (_LONG_RING * _SMALLEST_SHARE)
    return max(min(smallest, bucket_size), _SMALLEST_NUMEL)


def _cut(
    index: int, numel: int, bucket_size: int, unit: int, smallest: int, *, is_tapered: bool
) -> Iterator[_Part]:
    """Yield parts of a parameter, multiples of `unit` but for the last: halving if tapered, else about equal.
    They depend only on sizes that are equal on all ranks: two stages must cut a tied embedding alike.
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
