"""Domains: parameters that share a flat buffer, as the same ranks hold copies of them in the same type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.choices import ZeroStage
from patch.errors import ConfigError
from patch.layout.buckets import BucketRange


class Domain(NamedTuple):
    """What the buckets of one flat buffer have in common."""

    zero_stage: ZeroStage
    """What the ranks of `instance` share; the same in all domains of a rank."""
    group: dist.ProcessGroup
    """The data-parallel ranks (with context parallelism) that hold copies of the parameters."""
    dtype: torch.dtype
    """Type of the parameters."""
    instance: dist.ProcessGroup
    """Those of `group` that share sums and states: all, or an instance of the distributed optimizer."""
    across: dist.ProcessGroup | None
    """Those of `group` that have the same shard in their instances; None: there is one instance."""
    travels_as: torch.dtype | None
    """The type in which gradients travel inside an instance; None: that in which they are collected."""
    gathered_as: torch.dtype | None = None
    """The 8-bit type in which parameters travel (eight_bit_flat.py); None: their own."""

    @property
    def num_shards(self) -> int:
        """Ranks that share the sum; 1 where every rank gets all of it."""
        return 1 if self.zero_stage is ZeroStage.NONE else self.instance.size()

    @property
    def rank(self) -> int:
        """This rank's shard."""
        return 0 if self.zero_stage is ZeroStage.NONE else self.instance.rank()

    def own(self, bucket_range: BucketRange) -> tuple[int, int]:
        """This rank's part [begin, end) of a bucket, counted in the flat buffer."""
        return bucket_range.shard(self.rank, self.num_shards)

    @property
    def replica(self) -> int:
        """Which of the ranks with the same shard this one is."""
        if self.zero_stage is ZeroStage.NONE:
            return self.group.rank()
        return 0 if self.across is None else self.across.rank()


class Instances(NamedTuple):
    """The instances of the distributed optimizer, as a rank sees them."""

    own: dist.ProcessGroup
    """The ranks of its instance."""
    across: dist.ProcessGroup
    """The ranks with its shard in all instances."""


def find_instances(
    groups: ProcessGroupCollection, zero_stage: ZeroStage, dp_groups: Sequence[dist.ProcessGroup]
) -> Instances | None:
    """The instances of the distributed optimizer; None: all data-parallel ranks are one.

    Args:
        groups: with inter_dist_opt and intra_dp_cp where there are several instances.
        zero_stage: what data-parallel ranks share.
        dp_groups: the ranks that hold copies of the parameters of each parameter group.
    Raises:
        ConfigError: several instances that share nothing, or of parameters that other ranks hold.
    """
    across = getattr(groups, "inter_dist_opt", None)  # not there if nobody set it
    if across is None:
        return None
    if zero_stage is ZeroStage.NONE or any(group is not groups.dp_cp for group in dp_groups):
        why = "share states (optimizer, gradients) of parameters that all data-parallel ranks hold"
        raise ConfigError(
            f"got {across.size()} instances, expected 1: instances {why}",
            field="num_distributed_optimizer_instances",
        )
    return Instances(groups.intra_dp_cp, across)


def find_domains(
    placed: Sequence[tuple[dist.ProcessGroup, torch.dtype, torch.dtype | None]],
    zero_stage: ZeroStage,
    default: tuple[dist.ProcessGroup, torch.dtype],
    instances: Instances | None = None,
    travels_as: torch.dtype | None = None,
) -> tuple[list[Domain], list[int]]:
    """The domains of parameters, and the index of each parameter's.

    Args:
        placed: of each parameter its data-parallel ranks, its type, and the type in which it is gathered if
            that is another one.
        zero_stage: what data-parallel ranks share.
        default: of the one domain of a rank without parameters.
        instances: into which the data-parallel ranks are divided, the same ones for all parameters.
        travels_as: the type in which gradients travel.
    Raises:
        ConfigError: a type for gradients that an all-reduce would add up in it.
    """
    if travels_as is not None and zero_stage.sums_on_the_way(default[0].size()):
        raise ConfigError(
            "got true, expected false: without sharding gradients are all-reduced, which adds up in the type "
            "that travels",
            field="grad_reduce_in_bf16",
        )
    own, across = instances or (None, None)
    shares = zero_stage is not ZeroStage.NONE
    # What nobody else needs is not gathered.
    placed = [
        (group, dtype, gathered_as if shares and (own or group).size() > 1 else None)
        for group, dtype, gathered_as in placed
    ]
    keys = list(dict.fromkeys(placed)) or [(*default, None)]
    domains = [
        Domain(zero_stage, group, dtype, own or group, across, travels_as, gathered_as)
        for group, dtype, gathered_as in keys
    ]
    return domains, [keys.index(key) for key in placed]
