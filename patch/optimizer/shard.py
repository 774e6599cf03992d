"""What the two halves of the optimizer share: this rank's part of a bucket, and the runs in it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Run(NamedTuple):
    """Neighbouring elements [begin, end) of a shard that are treated alike."""

    begin: int
    end: int
    is_decayed: bool
    is_late: bool
    """Whether the gradient is not yet final when its bucket is reduced: other ranks are summed over too."""


class Shard(NamedTuple):
    """This rank's part of one bucket."""

    gradient: torch.Tensor
    """(n,) the reduced gradient."""
    weight: torch.Tensor
    """(n,) a view of the flat buffer of weights."""
    runs: list[Run]
    """Its elements without padding."""
