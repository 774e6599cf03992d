"""A rank's shard of each bucket (`patch.layout.buckets`), and its elements that are treated alike."""

from __future__ import annotations

from typing import NamedTuple

import torch


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
