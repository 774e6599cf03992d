"""Domains: parameters that share a flat buffer, as the same ranks hold copies of them in the same type.

What these ranks share of them is the domain's `Sharding`, one class for each ZeRO stage:

    stage        reduced                              kept of gradients     gathered
    NONE         once a step, all-reduce              the sums of all       nothing
    OPTIMIZER    once a step, reduce-scatter          full buffers          each bucket, after its update
    GRADIENTS    every micro-batch, reduce-scatter    the rank's shards     each bucket, after its update
    PARAMETERS   every micro-batch, reduce-scatter    the rank's shards     each unit, for each pass
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.distributed.async_collectives import Pending, RoundedSums, start_all_reduce, start_reduce_scatter
from patch.errors import ConfigError
from patch.layout.buckets import BucketRange, ParamSpec, flat_numels, lay_out
from patch.memory import host_zeros
from patch.optimizer.trained import HeldParameters, TrainedParameters, unit_modules


class Places(NamedTuple):
    """Where a rank keeps the gradients of one bucket."""

    shard: torch.Tensor
    """(n,) the sum of its shard."""
    buffer: torch.Tensor | None
    """All gradients of the bucket; None: it is staged."""


class Sharding:
    """How the ranks of a domain shard: which gradients are reduced and kept, and when.

    Parameters are gathered where states are shared, which is the param buffer's work.
    """

    stage: ClassVar[ZeroStage]
    collective: ClassVar[str] = "reduce-scatter"
    """The collective that reduces a bucket."""

    @property
    def shares_states(self) -> bool:
        """Whether a rank updates its shards only, so that parameters are gathered afterwards."""
        return self.stage.shares_states

    @property
    def is_staged(self) -> bool:
        """Whether a rank keeps the sums of its shards only.

        Each bucket is then collected in a staging buffer, and reduced in every micro-batch.
        """
        return self.stage.shares_gradients

    def kept(self, domain: Domain, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Zeros for what a rank keeps of the gradients of a domain of `numel` elements."""
        return like.new_zeros(numel)

    def places(self, domain: Domain, kept: torch.Tensor, bucket: BucketRange) -> Places:
        """Where a bucket's gradients are kept."""
        begin, end = domain.own(bucket)
        return Places(kept[begin:end], kept[bucket.begin : bucket.end])

    def start_reduction(
        self, domain: Domain, buffer: torch.Tensor, out: torch.Tensor, rounded_sums: RoundedSums | None
    ) -> Pending:
        """Sum a bucket's gradients over the ranks that share it.

        Args:
            domain: of the bucket.
            buffer: the gradients.
            out: gets the sum of this rank's shard; a part of the buffer, or other memory.
            rounded_sums: over NCCL, for gradients that travel in fewer bits.
        """
        if rounded_sums is not None:
            return rounded_sums.start(buffer, out, domain.instance)
        return start_reduce_scatter(buffer, out, domain.instance, domain.travels_as)


class Replicated(Sharding):
    """`NONE`: every rank keeps all sums and states, and updates all parameters."""

    stage, collective = ZeroStage.NONE, "all-reduce"

    def start_reduction(
        self, domain: Domain, buffer: torch.Tensor, out: torch.Tensor, rounded_sums: RoundedSums | None
    ) -> Pending:
        """All of it, in place: `out` is a part of the buffer."""
        return start_all_reduce(buffer, domain.group)


class ShardedStates(Sharding):
    """`OPTIMIZER`: a rank has the states of its shards; gradients have full buffers."""

    stage = ZeroStage.OPTIMIZER


class ShardedGradients(Sharding):
    """`GRADIENTS`: a rank has states and sums of its shards; buckets take turns in staging buffers."""

    stage = ZeroStage.GRADIENTS

    def kept(self, domain: Domain, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Gradients of this rank's shards alone; on the host if its parameters are."""
        return domain.new_shards(like, numel)

    def places(self, domain: Domain, kept: torch.Tensor, bucket: BucketRange) -> Places:
        """The shard; gradients have no place of their own."""
        return Places(kept[bucket.begin // domain.num_shards : bucket.end // domain.num_shards], None)


class ShardedParameters(ShardedGradients):
    """`PARAMETERS`: parameters, too, have memory for a rank's shards only (sharded_flat.py)."""

    stage = ZeroStage.PARAMETERS


SHARDINGS = {
    each.stage: each for each in (Replicated(), ShardedStates(), ShardedGradients(), ShardedParameters())
}


class Domain(NamedTuple):
    """The common settings of the buckets of one flat buffer."""

    sharding: Sharding
    """How the ranks of `instance` shard; the same in all domains of a rank."""
    group: dist.ProcessGroup
    """The data-parallel ranks (with context parallelism) that hold copies of the parameters."""
    dtype: torch.dtype
    """Type of the parameters."""
    instance: dist.ProcessGroup
    """Ranks of `group` that shard sums and states: all, or an instance of the distributed optimizer."""
    across: dist.ProcessGroup | None
    """Ranks of `group` that have the same shard in their instances; None: there is one instance."""
    travels_as: torch.dtype | None
    """The type in which gradients travel inside an instance; None: that in which they are collected."""
    gathered_as: torch.dtype | None = None
    """The 8-bit type in which parameters travel (eight_bit_flat.py); None: their own."""
    gathers: dist.ProcessGroup | None = None
    """The ranks of `instance` once more, for gathers between reductions: ranks whose unused parameters differ
    reduce at other times, and messages of one group need one order."""

    is_on_host: bool = False
    """Whether shards of parameters and gradients lie in host memory, where they are updated."""

    @property
    def num_shards(self) -> int:
        """Ranks that share the sum; 1 where every rank gets all of it."""
        return self.instance.size() if self.sharding.shares_states else 1

    def new_shards(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """(numel / shards,) zeros of the type of `like`: on its device, or where the parameters are."""
        own = numel // self.num_shards
        return host_zeros(own, like.dtype, like.device) if self.is_on_host else like.new_zeros(own)

    def own(self, bucket_range: BucketRange) -> tuple[int, int]:
        """This rank's part [begin, end) of a bucket, counted in the flat buffer."""
        rank = self.instance.rank() if self.sharding.shares_states else 0
        return bucket_range.shard(rank, self.num_shards)

    def start_sum_of_instances(self, shard: torch.Tensor) -> Pending:
        """Sum this rank's shard, which its instance has summed, over all instances."""
        assert self.across is not None
        return start_all_reduce(shard, self.across)

    @property
    def replica(self) -> int:
        """Which of the ranks with the same shard this one is."""
        copies = self.across if self.sharding.shares_states else self.group
        return 0 if copies is None else copies.rank()


@dataclass(frozen=True)
class FlatLayout:
    """Where each parameter of a rank lies."""

    held: HeldParameters
    """The parameters; the rest refers to them by index."""
    domains: list[Domain]
    """All of one sharding; at least one."""
    specs: list[ParamSpec]
    """The specs of the parameters."""
    bucket_ranges: list[BucketRange]
    """Buckets in the order of backward, which refer to domains by index."""
    gathers: dict[dist.ProcessGroup, dist.ProcessGroup] = field(default_factory=dict)
    """For each group that shards parameters a second group of its ranks (see `Domain`)."""

    @property
    def numels(self) -> list[int]:
        """Elements of each domain's flat buffer."""
        return flat_numels(self.bucket_ranges, len(self.domains))


def flat_layout(
    trained: TrainedParameters, config: OptimizerConfig, zero_stage: ZeroStage, groups: ProcessGroupCollection
) -> FlatLayout:
    """Find the domains of parameters, and cut them into buckets.

    Args:
        trained: the parameters. Those with an attribute `gather_dtype` are gathered in that type.
        config: bucket size, and the type in which gradients travel.
        zero_stage: what data-parallel ranks share.
        groups: dp_cp; of several instances also intra_dp_cp and inter_dist_opt.
    Raises:
        ConfigError: a type for gradients that an all-reduce would add up in it; several instances that share
            nothing, or of parameters that other ranks hold.
    """
    dp_groups = [group.data_parallel_group or groups.dp_cp for group in trained.groups]
    own, across = _instances(groups, zero_stage, dp_groups)
    # All ranks of the job decide this alike, whatever parameters they hold.
    if all(group.size() == 1 for group in [groups.dp_cp, *dp_groups]):
        alone = ZeroStage.PARAMETERS if config.cpu_offloading_weights else ZeroStage.NONE
        zero_stage, across = alone, None
    gathers: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    if zero_stage.shares_parameters:
        for group in dict.fromkeys((own or group) for group in [groups.dp_cp, *dp_groups]):
            if group.size() > 1:
                gathers[group] = same_ranks(group)
    sharding = SHARDINGS[zero_stage]
    if config.grad_reduce_in_bf16 and sharding.stage.sums_on_the_way(groups.dp_cp.size()):
        raise ConfigError(
            "got true, expected false: without sharding gradients are all-reduced, which adds up in the type "
            "that travels",
            field="grad_reduce_in_bf16",
        )
    travels_as = torch.bfloat16 if config.grad_reduce_in_bf16 and sharding.shares_states else None
    units, on_host = [0] * len(trained.parameters), set[int]()
    if sharding.stage.shares_parameters:
        numbers = _unit_numbers(trained.stages, config.param_persistence_threshold)
        units, on_host = [numbers[each] for each in trained.parameters], _units_on_host(numbers, config)
    placed = []
    for index, parameter, unit in zip(trained.group_indices, trained.parameters, units, strict=True):
        group, gathered_as = dp_groups[index], getattr(parameter, "gather_dtype", None)
        # What nobody else needs is not gathered; among units, what stays whole has its own type.
        is_gathered = sharding.shares_states and (own or group).size() > 1
        is_gathered &= unit > 0 or not sharding.stage.shares_parameters
        placed.append((group, parameter.dtype, gathered_as if is_gathered else None, unit in on_host))
    keys = list(dict.fromkeys(placed)) or [(groups.dp_cp, trained.dtype, None, False)]
    domains = [
        Domain(
            sharding, group, dtype, own or group, across, travels_as, gathered_as, gathers.get(own or group),
            is_on_host,
        )
        for group, dtype, gathered_as, is_on_host in keys
    ]  # fmt: skip
    specs = trained.specs([keys.index(key) for key in placed], units)
    is_padded = config.ddp_pad_buckets_for_high_nccl_busbw and any(d.group.size() > 1 for d in domains)
    shares = [domain.num_shards for domain in domains]
    buckets = lay_out(specs, config.reduce_bucket_size, shares, is_padded=is_padded)
    return FlatLayout(trained, domains, specs, buckets, gathers)


def same_ranks(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Another group of these ranks, whose messages have an order of their own."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def frozen_layout(
    layout: FlatLayout, config: OptimizerConfig, groups: ProcessGroupCollection
) -> FlatLayout | None:
    """Where the frozen weights lie of which ranks keep shards; None: all stay as they are.

    Args:
        layout: of what is trained in the same stages.
        config: bucket size, and which weights are too small.
        groups: see `flat_layout`; of distributed experts also expt_dp.
    """
    stages, first = layout.held.stages, layout.domains[0]
    if not first.sharding.stage.shares_parameters:
        return None
    numbers = _unit_numbers(stages, config.param_persistence_threshold)
    on_host = _units_on_host(numbers, config)
    named, specs, keys = [], list[ParamSpec](), list[tuple[dist.ProcessGroup, torch.dtype, bool]]()
    for stage, module in reversed(list(enumerate(stages))):
        for name, parameter in reversed(list(module.named_parameters())):
            is_expert = not getattr(parameter, "allreduce", True)
            group = getattr(groups, "expt_dp", None) if is_expert else groups.dp_cp
            instance, unit = first.instance if first.across is not None else group, numbers[parameter]
            is_kept = parameter.requires_grad or not unit or parameter.device != layout.held.device
            if is_kept or instance is None or (instance not in layout.gathers and unit not in on_host):
                continue
            key = layout.gathers.get(instance, instance), parameter.dtype, unit in on_host
            keys += [] if key in keys else [key]
            named.append((name, parameter))
            specs.append(ParamSpec(parameter.numel(), 0, False, stage, keys.index(key), 0, unit))
    if not named:
        return None
    domains = [
        Domain(
            first.sharding, ranks, dtype, ranks, first.across, None,
            gathers=ranks if ranks.size() > 1 else None, is_on_host=is_on_host,
        )
        for ranks, dtype, is_on_host in keys
    ]  # fmt: skip
    shares = [domain.num_shards for domain in domains]
    buckets = lay_out(specs, config.reduce_bucket_size, shares)
    return FlatLayout(HeldParameters(stages, named), domains, specs, buckets)


def _unit_numbers(stages: Sequence[torch.nn.Module], smallest: int) -> dict[torch.nn.Parameter, int]:
    """The unit with which each parameter is gathered: its module's number, or 0 if it is to stay whole.

    That is a parameter of fewer than `smallest` elements, or one of several modules.
    """
    found: dict[torch.nn.Parameter, int] = {}
    for number, unit in enumerate(unit_modules(stages), 1):
        for parameter in unit.parameters:
            stays = parameter.numel() < smallest or found.get(parameter, number) != number
            found[parameter] = 0 if stays else number
    return found


def check_on_host(domains: Sequence[Domain], *, is_offloading: bool) -> None:
    """Refuse weights in host memory that nobody there updates, or whose gradients travel from there.

    Args:
        domains: all of this rank's.
        is_offloading: whether optimizer states may go to the host.
    Raises:
        ConfigError: states stay on the device, or there are several instances.
    """
    on_host = [domain for domain in domains if domain.is_on_host]
    if on_host and not is_offloading:
        raise ConfigError(
            "got true, expected false, or static or auto at --optimizer-offload-policy: weights in host "
            "memory are updated there",
            field="cpu_offloading_weights",
        )
    if any(domain.across is not None for domain in on_host):
        raise ConfigError(
            "got several instances, expected 1 beside --cpu-offloading-weights: they sum gradients on the "
            "device, and those of weights in host memory lie there too",
            field="num_distributed_optimizer_instances",
        )


def _units_on_host(numbers: Mapping[torch.nn.Parameter, int], config: OptimizerConfig) -> set[int]:
    """The units whose shards lie in host memory: the first in backward, as of optimizer states.

    Args:
        numbers: see `_unit_numbers`.
        config: which share of what comes and goes.
    """
    fraction = config.cpu_offloading_weights_fraction
    share = (1.0 if fraction is None else fraction) if config.cpu_offloading_weights else 0.0
    sizes = Counter[int]()
    for parameter, unit in numbers.items():
        sizes[unit] += parameter.numel() if unit else 0
    left, found = share * sizes.total(), set[int]()
    for unit in sorted(filter(None, sizes), reverse=True):
        if left > 0:
            found.add(unit)
        left -= sizes[unit]
    return found


def _instances(
    groups: ProcessGroupCollection, zero_stage: ZeroStage, dp_groups: Sequence[dist.ProcessGroup]
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's instance of the distributed optimizer, and the ranks with its shard in all of them.

    None: there is one.
    """
    across = getattr(groups, "inter_dist_opt", None)  # not there if nobody set it
    if across is None:
        return None, None
    if not zero_stage.shares_states or any(group is not groups.dp_cp for group in dp_groups):
        why = "share states (optimizer, gradients) of parameters that all data-parallel ranks hold"
        raise ConfigError(
            f"got {across.size()} instances, expected 1: instances {why}",
            field="num_distributed_optimizer_instances",
        )
    return groups.intra_dp_cp, across
