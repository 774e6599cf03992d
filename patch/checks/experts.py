"""Rules of experts: how they are distributed, and how a router chooses them."""

from __future__ import annotations

from patch.checks.model import divisors
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.families import family_of, reason_without_hf_class

_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


def experts_are_distributed(config: RunConfig, machine: MachineFacts) -> None:
    """Require ranks to share the experts of a layer, and the channels of an expert, evenly."""
    model, ep_size, etp_size = config.model, config.experts.expert_model_parallel_size, config.etp_size
    if not model.num_experts:
        return
    why = f"a layer has {model.num_experts} experts"
    if model.moe_router_topk > model.num_experts:
        refuse("moe_router_topk", model.moe_router_topk, f"at most {model.num_experts}", why)
    if model.num_experts % ep_size:
        refuse(_EP, ep_size, f"one of {divisors(model.num_experts)}", why)
    tp_size = config.parallel.tensor_model_parallel_size
    pp_size = config.parallel.pipeline_model_parallel_size
    if ep_size == 1 and etp_size != tp_size:
        # At EP=1 megatron-core treats experts as other weights (tensor_parallel/layers.py:886, 1209).
        why = f"without {where(_EP)} experts would have wrong gradients: ranks of a TP group hold other parts"
        refuse(_ETP, etp_size, f"0, or TP={tp_size}", why)
    if model.expert_width % etp_size:
        why = f"an expert has {model.expert_width} channels"
        refuse(_ETP, etp_size, f"one of {divisors(model.expert_width)}", why)
    if config.world_size % (ep_size * etp_size * pp_size):
        sizes = f"EP x ETP x PP = {ep_size} x {etp_size} x {pp_size}"
        why = f"the {config.world_size} processes are a multiple of {sizes}"
        refuse(_EP, ep_size, "another size, or other processes", why)
    if tp_size > 1 and not config.parallel.sequence_parallel:
        why = "with experts each rank of a TP group chooses for its own tokens (megatron-core)"
        refuse("sequence_parallel", "false", f"true at TP={tp_size}", why)
    if ep_size > 1 and etp_size > 1 and not machine.cuda_devices:
        if config.experts.moe_token_dispatcher_type == "alltoall":
            why = f"at EP={ep_size} and ETP={etp_size} its parts differ in size, which gloo cannot gather"
            refuse("moe_token_dispatcher_type", "alltoall", "allgather on CPUs", why)


def experts_share_pipelines(config: RunConfig, machine: MachineFacts | None = None) -> None:
    """Require a rank order in which experts have the same pipelines as the layers around them."""
    if config.model.num_experts and not config.experts_share_pipelines:
        layers, of_experts = (
            ", ".join(f"{axis.upper()}={size}" for axis, size in axes.items())
            for axes in (config.axes, config.expert_axes)
        )
        raise ConfigError(
            f"got {config.parallel.rank_order} with {layers}, and for experts {of_experts}, expected an "
            "order that ends in pp, or EP x ETP = CP x TP and these axes on one side of pp: experts would "
            "have other pipelines than the layers around them",
            field="rank_order",
        )


def experts_are_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Require a router that can choose, and a transformers class for --precision-align."""
    if not config.model.num_experts:
        return
    model = config.model
    _groups_are_possible(config)
    if (
        model.moe_router_topk == 1
        and model.moe_router_score_function == "softmax"
        and not model.moe_router_pre_softmax
    ):
        why = "a softmax over the one expert of a token is 1, whatever the router says"
        refuse("moe_router_pre_softmax", "false", f"true with {where('moe_router_topk')} 1", why)
    if model.precision_align is not None and family_of(model) is None:
        why, cure = reason_without_hf_class(model)
        refuse("precision_align", model.precision_align, f"none, or {cure}", why)


def _groups_are_possible(config: RunConfig) -> None:
    """Require router groups of equal size; the chosen groups hold at least top-k experts (DeepSeek)."""
    model = config.model
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and chosen is None:
        return
    if not groups or not chosen:
        field = "moe_router_num_groups" if groups else "moe_router_group_topk"
        expected = f"0, or both {where('moe_router_num_groups')} and {where('moe_router_group_topk')}"
        refuse(field, groups or chosen, expected, "a token visits some of all groups")
    number = model.num_experts or 1
    if number % groups:
        why = f"a layer has {number} experts"
        refuse("moe_router_num_groups", groups, f"one of {divisors(number)}", why)
    fewest = -(-model.moe_router_topk * groups // number)
    if not fewest <= chosen <= groups:
        why = f"a token visits {model.moe_router_topk} of {number} experts in {groups} groups"
        refuse("moe_router_group_topk", chosen, f"{fewest} to {groups}", why)
    if model.moe_router_score_function == "sigmoid" and number == groups:
        why = "with sigmoid scores a group is judged by its two best experts"
        refuse("moe_router_num_groups", groups, f"at most {number // 2}", why)
