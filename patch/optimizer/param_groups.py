"""Parameter groups: parameters with the same weight decay, data-parallel group and learning rate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import OptimizerConfig
from patch.errors import ConfigError, TrainingError
from patch.features.optimizers import optimizer_of


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """Parameters with the same settings, like a dict of `param_groups` in torch's optimizers."""

    params: Sequence[torch.nn.Parameter]
    weight_decay: float
    lr_multiplier: float = 1.0
    """Factor on the learning rate that `zero_grad` gets for the group."""
    max_lr: float | None = None
    min_lr: float | None = None
    """The group's limits of the schedule, see `learning_rate`, or None to use the configuration's."""
    orthogonalizes: bool = False
    """Whether the parameters are matrices that are updated whole (muon.py)."""
    data_parallel_group: dist.ProcessGroup | None = None
    """The ranks that hold copies of these parameters and sum their gradients, as for experts. None: the
    job's data-parallel ranks. All ranks must have the same groups, if need be without parameters."""


class Matrix(NamedTuple):
    """How a parameter is made of whole matrices."""

    group: dist.ProcessGroup | None
    """The tensor-parallel ranks that share it, or None if each has all of it."""
    split: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    """Returns the matrices from the parameter's shards on all ranks of `group`."""
    join: Callable[[torch.Tensor, list[torch.Tensor]], object]
    """Writes this rank's shard of the parameter from the matrices."""


def default_param_groups(
    stages: Sequence[torch.nn.Module],
    config: OptimizerConfig,
    groups: ProcessGroupCollection | None = None,
    *,
    rates: Mapping[str, float] = MappingProxyType({}),
) -> list[ParamGroup]:
    """Apply megatron-core's rules: matrices decay; vectors (norms, biases) and any "bias" do not.

    With a decoupled rate (--decoupled-lr), weights that megatron-core marks as embedding or output layer form
    separate groups. So do matrices that are updated whole, and parameters whose names end with a key of
    `rates`, a factor on the learning rate. Distributed experts (marked `allreduce=False`, EP > 1) form
    separate groups on all ranks, even without experts.
    Source: megatron/core/optimizer/__init__.py, `get_standard_config_overrides`; there a parameter without
    dimensions decays, here it does not.
    """
    is_decoupling = config.decoupled_lr is not None
    of_experts = None
    ranks_of_experts = getattr(groups, "ep", None)  # missing without experts; None since 0.19
    if groups is not None and ranks_of_experts is not None and ranks_of_experts.size() > 1:
        of_experts = groups.expt_dp
    has_whole_matrices = optimizer_of(config).updates_whole_matrices
    members: dict[tuple[bool, dist.ProcessGroup | None, bool, bool, float], list[torch.nn.Parameter]] = {
        (*kind, decays, is_matrix, factor): []
        for kind in ((False, None), (False, of_experts), (is_decoupling, None))
        for decays, is_matrix in ((True, False), (False, False), *([(True, True)] * has_whole_matrices))
        for factor in (1.0, *rates.values())
    }
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                is_marked = getattr(parameter, "is_embedding_or_output_parameter", False)
                holders = None if getattr(parameter, "allreduce", True) else of_experts
                decays = parameter.ndim > 1 and not name.endswith(".bias")
                is_matrix = has_whole_matrices and parameter.ndim == 2 and not is_marked
                factor = next((rates[end] for end in rates if name.endswith(end)), 1.0)
                members[is_marked and is_decoupling, holders, decays, is_matrix, factor].append(parameter)
    return [
        ParamGroup(
            params,
            config.weight_decay if decays else 0.0,
            factor,
            max_lr=config.decoupled_lr if is_decoupled else None,
            min_lr=config.decoupled_min_lr if is_decoupled else None,
            data_parallel_group=holders,
            orthogonalizes=is_matrix,
        )
        for (is_decoupled, holders, decays, is_matrix, factor), params in members.items()
    ]


def group_rates(lr: float | Sequence[float], groups: Sequence[ParamGroup]) -> list[float]:
    """Return the learning rate of each group in one step, multipliers included.

    Raises:
        TrainingError: `lr` is a sequence with another number of rates than of groups.
    """
    rates = [lr] * len(groups) if isinstance(lr, (int, float)) else lr
    if len(rates) != len(groups):
        raise TrainingError(
            f"got {len(rates)} learning rates for {len(groups)} parameter groups, expected one rate for all "
            "groups, or one for each"
        )
    return [rate * group.lr_multiplier for rate, group in zip(rates, groups, strict=True)]


def assign_groups(
    trained: Sequence[tuple[str, torch.nn.Parameter]], groups: Sequence[ParamGroup]
) -> list[int]:
    """Return the index of each trainable parameter's group; groups may hold frozen parameters too.

    Raises:
        ConfigError: a parameter is in no group or in several; a group holds a parameter of no stage; or an
            expert (megatron-core's mark `allreduce=False`) is in a group without data-parallel group.
    """
    found: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        for parameter in group.params:
            found.setdefault(id(parameter), []).append(index)
    for name, parameter in trained:
        if (number := len(found.get(id(parameter), []))) != 1:
            raise ConfigError(f"{name} is in {number} parameter groups, expected one: change `param_groups`")
        (index,) = found[id(parameter)]
        if not getattr(parameter, "allreduce", True) and groups[index].data_parallel_group is None:
            raise ConfigError(
                f"{name}: an expert-parallel parameter, expected a parameter group with the "
                "`data_parallel_group` of its copies"
            )
    known = {id(parameter) for _, parameter in trained}
    for index, group in enumerate(groups):
        for parameter in group.params:
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(
                    f"parameter group {index} holds a parameter of shape {tuple(parameter.shape)} that is in "
                    "no stage, expected parameters of the model that the optimizer is built with"
                )
    return [found[id(parameter)][0] for _, parameter in trained]
