"""Parameter groups: which parameters share a weight decay, data-parallel ranks, and a learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import OptimizerConfig
from patch.errors import ConfigError, TrainingError


@dataclass(frozen=True, eq=False)
class ParamGroup:
    """Parameters that are updated alike, as a dict of `param_groups` of torch's optimizers."""

    params: Sequence[torch.nn.Parameter]
    weight_decay: float
    lr_multiplier: float = 1.0
    """Factor on the rate that `zero_grad` gets for the group."""
    max_lr: float | None = None
    min_lr: float | None = None
    """The group's own ends of the schedule, see `learning_rate`; None: those of the configuration."""
    data_parallel_group: dist.ProcessGroup | None = None
    """The ranks that hold copies of these parameters: gradients are summed over them, and all other ranks
    hold other parameters (experts). None: the data-parallel ranks of the job. A rank that holds none of
    them has such a group too, without parameters: all ranks of the job must know that there is one."""


def default_param_groups(
    stages: Sequence[torch.nn.Module], config: OptimizerConfig, groups: ProcessGroupCollection | None = None
) -> list[ParamGroup]:
    """Megatron-core's rules: matrices decay; vectors (norms, biases) and everything named "bias" do not.

    With a decoupled rate (--decoupled-lr) the weights that megatron-core marks as those of the embedding and
    the output layer form groups of their own; so do the experts that it marks as distributed
    (`allreduce=False`), on all ranks, also those that hold none.

    Args:
        stages: the pipeline stages of this rank.
        config: weight decay and decoupled rates.
        groups: `ep` and `expt_dp` are used where experts are distributed (EP > 1).
    Source: megatron/core/optimizer/__init__.py, `get_standard_config_overrides`; there a parameter
    without any dimension decays, here it does not.
    """
    is_decoupling = config.decoupled_lr is not None
    of_experts = None
    ranks_of_experts = getattr(groups, "ep", None)  # without experts there is none, or None since 0.19
    if groups is not None and ranks_of_experts is not None and ranks_of_experts.size() > 1:
        of_experts = groups.expt_dp
    members: dict[tuple[bool, dist.ProcessGroup | None, bool], list[torch.nn.Parameter]] = {
        (*kind, decays): []
        for kind in ((False, None), (False, of_experts), (is_decoupling, None))
        for decays in (True, False)
    }
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                is_marked = getattr(parameter, "is_embedding_or_output_parameter", False)
                holders = None if getattr(parameter, "allreduce", True) else of_experts
                decays = parameter.ndim > 1 and not name.endswith(".bias")
                members[is_marked and is_decoupling, holders, decays].append(parameter)
    return [
        ParamGroup(
            params,
            config.weight_decay if decays else 0.0,
            max_lr=config.decoupled_lr if is_decoupled else None,
            min_lr=config.decoupled_min_lr if is_decoupled else None,
            data_parallel_group=holders,
        )
        for (is_decoupled, holders, decays), params in members.items()
    ]


def assign_groups(
    trained: Sequence[tuple[str, torch.nn.Parameter]], groups: Sequence[ParamGroup]
) -> list[int]:
    """Index of each trainable parameter's group.

    Args:
        trained: the parameters with their names. groups: may hold frozen parameters too.
    Raises:
        ConfigError: a parameter is in no group or in several; a group holds one that the stages do not have;
            an expert-parallel parameter (megatron-core's mark `allreduce=False`) is in a group without
            data-parallel ranks of its own.
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


def group_rates(lr: float | Sequence[float], groups: Sequence[ParamGroup]) -> list[float]:
    """The learning rate of each group in one step, multipliers included.

    Args:
        lr: one rate for all groups, or one for each.
    Raises:
        TrainingError: another number of rates than of groups.
    """
    rates = [lr] * len(groups) if isinstance(lr, (int, float)) else lr
    if len(rates) != len(groups):
        raise TrainingError(
            f"got {len(rates)} learning rates for {len(groups)} parameter groups, expected one rate for all "
            "groups, or one for each"
        )
    return [rate * group.lr_multiplier for rate, group in zip(rates, groups, strict=True)]


def learning_rate(
    step: float, train_iters: float, optimizer: OptimizerConfig, group: ParamGroup | None = None
) -> float:
    """The learning rate of one step, a pure function of it: linear warm-up, then cosine decay.

    Args:
        step: counted from 1. The first step has lr / warm-up steps (in Megatron-LM it has 0 and changes
            nothing); the last one has exactly min_lr. Steps of another batch size count by their samples.
        train_iters: steps of the whole run, where the cosine ends.
        optimizer: lr, min_lr and the number of warm-up steps.
        group: a parameter group, whose own max_lr and min_lr replace the optimizer's; None: the optimizer's.
    Source: Loshchilov & Hutter, arXiv:1608.03983, without restarts.
    """
    max_lr = optimizer.lr if group is None or group.max_lr is None else group.max_lr
    min_lr = optimizer.min_lr if group is None or group.min_lr is None else group.min_lr
    warmup = optimizer.lr_warmup_iters
    if step <= warmup:
        return max_lr * step / warmup
    progress = (step - warmup) / max(1, train_iters - warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return min_lr + (max_lr - min_lr) * cosine
