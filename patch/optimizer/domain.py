"""Domains: parameters that share a flat buffer, as the same ranks hold copies of them in the same type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from patch.config.choices import ZeroStage


class Domain(NamedTuple):
    """What the buckets of one flat buffer have in common."""

    zero_stage: ZeroStage
    """What the ranks of `group` share; the same in all domains of a rank."""
    group: dist.ProcessGroup
    """The data-parallel ranks (with context parallelism) that hold copies of the parameters."""
    dtype: torch.dtype
    """Of the parameters."""

    @property
    def num_shards(self) -> int:
        """Ranks that share the sum; 1 where every rank gets all of it."""
        return 1 if self.zero_stage is ZeroStage.NONE else self.group.size()

    @property
    def rank(self) -> int:
        """This rank's shard."""
        return 0 if self.zero_stage is ZeroStage.NONE else self.group.rank()


def find_domains(
    placed: Sequence[tuple[dist.ProcessGroup, torch.dtype]],
    zero_stage: ZeroStage,
    default: tuple[dist.ProcessGroup, torch.dtype],
) -> tuple[list[Domain], list[int]]:
    """The domains of parameters, and the index of each parameter's.

    Args:
        placed: data-parallel ranks and type of each parameter.
        zero_stage: what data-parallel ranks share.
        default: of the one domain of a rank without parameters.
    """
    keys = list(dict.fromkeys(placed)) or [default]
    return [Domain(zero_stage, *key) for key in keys], [keys.index(key) for key in placed]
