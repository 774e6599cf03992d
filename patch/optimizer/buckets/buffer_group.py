"""Buffer groups: parameters of one dtype and data-parallel group, which share a flat buffer.

The ZeRO stage of a buffer group says what its ranks shard:

    stage        gradients are reduced                a rank keeps            parameters are gathered
    NONE         once a step, all-reduce              all sums                never
    OPTIMIZER    once a step, reduce-scatter          full gradient buffers   each bucket, after its update
    GRADIENTS    every micro-batch, reduce-scatter    its gradient shards     each bucket, after its update
    PARAMETERS   every micro-batch, reduce-scatter    its gradient shards     each unit, for each pass
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.checks.activations import refuse_weights_on_host
from patch.checks.layout import check_rounded_gradients
from patch.config.choices import ZeroStage
from patch.config.schema import OptimizerConfig
from patch.distributed.async_collectives import (
    CommHandle,
    RoundedSums,
    start_all_reduce,
    start_reduce_scatter,
)
from patch.errors import ConfigError
from patch.features.table import HOST_WEIGHTS, INSTANCES, refuse_pair
from patch.layout.buckets import BucketRange, ParamRange, ParamSpec, flat_numels, lay_out
from patch.memory.offload_device import host_zeros
from patch.optimizer.trainable_params import ManagedParams, TrainableParams, unit_modules


class BufferGroup(NamedTuple):
    """The common settings of the buckets of one flat buffer."""

    stage: ZeroStage
    """The state that the ranks of `shard_group` shard; the same in all buffer groups of a rank."""
    group: dist.ProcessGroup
    """The data-parallel ranks (with context parallelism) that hold copies of the parameters."""
    dtype: torch.dtype
    shard_group: dist.ProcessGroup
    """Ranks of `group` that shard sums and states: all, or one distributed-optimizer instance."""
    replica_group: dist.ProcessGroup | None
    """Ranks with the same shard in all shard groups, or None if there is one shard group."""
    reduce_dtype: torch.dtype | None
    """The dtype of reduce-scatters in a shard group, or None for the dtype of collected gradients."""
    gather_dtype: torch.dtype | None = None
    """The fp8 dtype of all-gathers (fp8_params.py), or None for the dtype of the parameters."""
    all_gather_group: dist.ProcessGroup | None = None
    """A second group of the ranks of `shard_group`, for all-gathers between reductions. Ranks with different
    unused parameters reduce at different times, and one group needs the same order on all ranks."""

    is_on_host: bool = False
    """Whether shards of parameters and gradients are in host memory, where they are updated."""

    @property
    def is_staged(self) -> bool:
        """Whether buckets are staged; otherwise gradients are added in place. A single rank keeps all."""
        return self.stage.shards_gradients and (self.num_shards > 1 or self.is_on_host)

    @property
    def num_shards(self) -> int:
        """Return the number of ranks that share the sum, or 1 if every rank gets the whole sum."""
        return self.shard_group.size() if self.stage.shards_states else 1

    def new_shards(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Allocate (numel / shards,) zeros with the dtype of `like`, on its device or in host memory."""
        own = numel // self.num_shards
        return host_zeros(own, like.dtype, like.device) if self.is_on_host else like.new_zeros(own)

    def own(self, bucket: BucketRange) -> slice:
        """Return this rank's part of a bucket, in the flat buffer."""
        rank = self.shard_group.rank() if self.stage.shards_states else 0
        return slice(*bucket.shard(rank, self.num_shards))

    def in_shards(self, bucket: BucketRange) -> slice:
        """Return this rank's part of a bucket, in the memory of all its shards (`new_shards`)."""
        return slice(bucket.begin // self.num_shards, bucket.end // self.num_shards)

    def own_params(self, bucket: BucketRange) -> list[tuple[ParamRange, slice]]:
        """Return the parts of parameters in this rank's part of a bucket, and their places in that part."""
        own = self.own(bucket)
        parts = bucket.params_within(own.start, own.stop)
        return [(part, slice(part.begin - own.start, part.end - own.start)) for part in parts]

    def kept_gradients(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Allocate zeros for the gradients that a rank keeps of a flat buffer of `numel` elements."""
        return self.new_shards(like, numel) if self.is_staged else like.new_zeros(numel)

    def places(self, kept: torch.Tensor, bucket: BucketRange) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return where a bucket's gradients are in `kept`: this rank's shard, and all (None: staged)."""
        if self.is_staged:
            return kept[self.in_shards(bucket)], None
        return kept[self.own(bucket)], kept[bucket.begin : bucket.end]

    def start_reduction(
        self, buffer: torch.Tensor, out: torch.Tensor, rounded_sums: RoundedSums | None
    ) -> CommHandle:
        """Sum a bucket's gradients over its ranks.

        Args:
            out: gets the sum of this rank's shard; a part of `buffer`, or other memory.
            rounded_sums: reduces over NCCL in a narrower dtype, or None.
        """
        if self.shard_group.size() == 1 and not self.is_staged:
            return CommHandle([])
        if not self.stage.shards_states:  # in place: `out` is a part of the buffer
            return start_all_reduce(buffer, self.group)
        if rounded_sums is not None:
            return rounded_sums.start(buffer, out, self.shard_group)
        return start_reduce_scatter(buffer, out, self.shard_group, self.reduce_dtype)

    def start_sum_over_replicas(self, shard: torch.Tensor) -> CommHandle:
        """Sum this rank's shard, already reduced in its shard group, over all shard groups."""
        assert self.replica_group is not None
        return start_all_reduce(shard, self.replica_group)

    @property
    def replica(self) -> int:
        """Return this rank's index among the ranks with the same shard."""
        copies = self.replica_group if self.stage.shards_states else self.group
        return 0 if copies is None else copies.rank()


@dataclass(frozen=True)
class FlatLayout:
    """The place of each parameter of a rank in flat buffers."""

    held: ManagedParams
    """The parameters. Other fields refer to them by index."""
    buffer_groups: list[BufferGroup]
    """Buffer groups with the same sharding; at least one."""
    specs: list[ParamSpec]
    bucket_ranges: list[BucketRange]
    """Buckets in the order of backward, which refer to buffer groups by index."""
    all_gather_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def numels(self) -> list[int]:
        """Return the elements of each buffer group's flat buffer."""
        return flat_numels(self.bucket_ranges, len(self.buffer_groups))


def flat_layout(
    trained: TrainableParams, config: OptimizerConfig, zero_stage: ZeroStage, groups: ProcessGroupCollection
) -> FlatLayout:
    """Find the buffer groups of parameters, and cut them into buckets.

    Args:
        trained: the parameters. A parameter with an attribute `gather_dtype` is gathered in that dtype.
        groups: dp_cp is used; with several shard groups also intra_dp_cp and inter_dist_opt.
    Raises:
        ConfigError: an all-reduce would sum in the dtype of reductions; or several shard groups are combined
            with replicated states or with expert groups.
    """
    dp_groups = [group.data_parallel_group or groups.dp_cp for group in trained.groups]
    own, replica_group = _instances(groups, zero_stage, dp_groups)
    # All ranks of the job decide this alike, whatever parameters they hold.
    if all(group.size() == 1 for group in [groups.dp_cp, *dp_groups]):
        alone = ZeroStage.PARAMETERS if config.cpu_offloading_weights else ZeroStage.NONE
        zero_stage, replica_group = alone, None
    all_gather_groups: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
    if zero_stage.shards_parameters:
        for group in dict.fromkeys((own or group) for group in [groups.dp_cp, *dp_groups]):
            if group.size() > 1:
                all_gather_groups[group] = same_ranks(group)
    check_rounded_gradients(config, zero_stage, groups.dp_cp.size())
    reduce_dtype = torch.bfloat16 if config.grad_reduce_in_bf16 and zero_stage.shards_states else None
    units, on_host = [0] * len(trained.parameters), set[int]()
    if zero_stage.shards_parameters:
        numbers = _unit_numbers(trained.stages, config.param_persistence_threshold)
        units, on_host = [numbers[each] for each in trained.parameters], _units_on_host(numbers, config)
    kinds = [
        (dp_groups[index], parameter.dtype, getattr(parameter, "gather_dtype", None), unit)
        for index, parameter, unit in zip(trained.group_indices, trained.parameters, units, strict=True)
    ]
    placed = []
    for group, dtype, gather_dtype, unit in kinds or [(groups.dp_cp, trained.dtype, None, 0)]:
        # A single rank gathers nothing; at `PARAMETERS`, parameters that stay whole keep their own dtype.
        is_gathered = zero_stage.shards_states and (own or group).size() > 1
        is_gathered &= unit > 0 or not zero_stage.shards_parameters
        placed.append(
            BufferGroup(
                zero_stage, group, dtype, own or group, replica_group, reduce_dtype,
                gather_dtype if is_gathered else None, all_gather_groups.get(own or group), unit in on_host,
            )
        )  # fmt: skip
    buffer_groups = [*dict.fromkeys(placed)]
    specs = trained.specs([buffer_groups.index(each) for each in placed[: len(kinds)]], units)
    is_padded = config.ddp_pad_buckets_for_high_nccl_busbw and any(d.group.size() > 1 for d in buffer_groups)
    shares = [buffer_group.num_shards for buffer_group in buffer_groups]
    buckets = lay_out(specs, config.reduce_bucket_size, shares, is_padded=is_padded)
    return FlatLayout(trained, buffer_groups, specs, buckets, all_gather_groups)


def same_ranks(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create another group of the same ranks, whose collectives have a separate order."""
    return dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)


def frozen_layout(
    layout: FlatLayout, config: OptimizerConfig, groups: ProcessGroupCollection
) -> FlatLayout | None:
    """Return the layout of frozen weights that ranks shard, or None if all frozen weights stay whole.

    Args:
        layout: the layout of the trained parameters of the same stages.
        groups: see `flat_layout`; with distributed experts also expt_dp.
    """
    stages, first = layout.held.stages, layout.buffer_groups[0]
    if not first.stage.shards_parameters:
        return None
    numbers = _unit_numbers(stages, config.param_persistence_threshold)
    on_host = _units_on_host(numbers, config)
    named, specs, buffer_groups = [], list[ParamSpec](), list[BufferGroup]()
    for stage, module in reversed(list(enumerate(stages))):
        for name, parameter in reversed(list(module.named_parameters())):
            is_expert = not getattr(parameter, "allreduce", True)
            group = getattr(groups, "expt_dp", None) if is_expert else groups.dp_cp
            shard_group = group if first.replica_group is None else first.shard_group
            unit = numbers[parameter]
            is_kept = parameter.requires_grad or not unit or parameter.device != layout.held.device
            is_kept |= shard_group not in layout.all_gather_groups and unit not in on_host
            if is_kept or shard_group is None:
                continue
            ranks = layout.all_gather_groups.get(shard_group, shard_group)
            found = BufferGroup(
                first.stage, ranks, parameter.dtype, ranks, first.replica_group, None,
                all_gather_group=ranks if ranks.size() > 1 else None, is_on_host=unit in on_host,
            )  # fmt: skip
            buffer_groups += [] if found in buffer_groups else [found]
            named.append((name, parameter))
            specs.append(ParamSpec(parameter.numel(), 0, False, stage, buffer_groups.index(found), 0, unit))
    if not named:
        return None
    buckets = lay_out(specs, config.reduce_bucket_size, [each.num_shards for each in buffer_groups])
    return FlatLayout(ManagedParams(stages, named), buffer_groups, specs, buckets)


def _unit_numbers(stages: Sequence[torch.nn.Module], smallest: int) -> dict[torch.nn.Parameter, int]:
    """Number the unit of each parameter; 0 (whole) below `smallest` elements or in several modules."""
    found: dict[torch.nn.Parameter, int] = {}
    for number, unit in enumerate(unit_modules(stages), 1):
        for parameter in unit.parameters:
            stays = parameter.numel() < smallest or found.get(parameter, number) != number
            found[parameter] = 0 if stays else number
    return found


def check_on_host(buffer_groups: Sequence[BufferGroup], *, is_offloading: bool) -> None:
    """Refuse weights in host memory if states stay on the device or there are several shard groups."""
    on_host = [buffer_group for buffer_group in buffer_groups if buffer_group.is_on_host]
    if on_host and not is_offloading:
        refuse_weights_on_host()
    for replica_group in (each.replica_group for each in on_host if each.replica_group is not None):
        refuse_pair(INSTANCES, HOST_WEIGHTS, replica_group.size())


def _units_on_host(numbers: Mapping[torch.nn.Parameter, int], config: OptimizerConfig) -> set[int]:
    """Return the units with shards in host memory: the first in backward, as for optimizer states."""
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
    """Return this rank's shard group and replica group, or (None, None) if there is one shard group."""
    replica_group = getattr(groups, "inter_dist_opt", None)  # missing if it was not set
    if replica_group is None:
        return None, None
    if not zero_stage.shards_states or any(group is not groups.dp_cp for group in dp_groups):
        why = "several instances need sharded states and no expert groups"
        raise ConfigError(
            f"got {replica_group.size()} instances, expected 1: {why}",
            field="num_distributed_optimizer_instances",
        )
    return groups.intra_dp_cp, replica_group
