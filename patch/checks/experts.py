"""The rules of experts: how they are distributed, and what a model that has them cannot do yet."""

from __future__ import annotations

from patch.checks.model import divisors
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.families import family_of, no_class

_EP, _ETP, _TP = "expert_model_parallel_size", "expert_tensor_parallel_size", "tensor_model_parallel_size"


def experts_are_distributed(config: RunConfig, machine: MachineFacts) -> None:
    """Processes share the experts of a layer, and the channels of an expert, evenly."""
    model, ep_size, etp_size = config.model, config.experts.expert_model_parallel_size, config.etp_size
    if not model.num_experts:
        return
    if model.moe_router_topk > model.num_experts:
        why = f"a layer has {model.num_experts} experts"
        refuse("moe_router_topk", model.moe_router_topk, f"at most {model.num_experts}", why)
    if model.num_experts % ep_size:
        why = f"a layer has {model.num_experts} experts"
        refuse(_EP, ep_size, f"one of {divisors(model.num_experts)}", why)
    tp_size = config.parallel.tensor_model_parallel_size
    pp_size = config.parallel.pipeline_model_parallel_size
    if ep_size == 1 and etp_size != tp_size:
        # megatron-core takes them for other weights there (tensor_parallel/layers.py:886, 1209).
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
    """The order of ranks gives experts the pipelines of the layers around them."""
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
    """Refuse what is not built for experts."""
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
    if model.moe_shared_expert_gate and not model.moe_shared_expert_intermediate_size:
        expected = f"false, or a width at {where('moe_shared_expert_intermediate_size')}"
        refuse("moe_shared_expert_gate", "true", expected, "no expert has all tokens")
    if config.has_8_bits:
        refuse("precision", "fp8", "bf16, fp16 or fp32", "experts have no 8-bit products yet")
    _aligned_form_is_possible(config)
    instances = config.parallel.num_distributed_optimizer_instances
    if instances > 1 and config.experts.expert_model_parallel_size > 1:
        why = "an instance holds all experts, which are distributed over more ranks"
        refuse("num_distributed_optimizer_instances", instances, f"1 with {where(_EP)}", why)


def _aligned_form_is_possible(config: RunConfig) -> None:
    """transformers' order of operations is asked for where it can be had: in one process."""
    model = config.model
    if model.precision_align is None:
        return
    if family_of(model) is None:
        why, cure = no_class(model)
        refuse("precision_align", model.precision_align, f"none, or {cure}", why)
    none, sizes = f"none at {where('precision_align')}", config.parallel
    why = "transformers adds up what all experts of a token give in one process"
    for field, size in (
        (_EP, config.experts.expert_model_parallel_size),
        (_TP, sizes.tensor_model_parallel_size),
    ):
        if size > 1:
            refuse(field, size, f"1, or {none}", why)
    factor = config.experts.moe_expert_capacity_factor
    if factor is not None:
        refuse("moe_expert_capacity_factor", factor, f"0, or {none}", "in transformers no expert is full")


def _groups_are_possible(config: RunConfig) -> None:
    """Groups of experts are even, and the chosen ones have enough experts; the rule is DeepSeek-V2's."""
    model = config.model
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups is None and chosen is None:
        return
    if not groups or not chosen:
        field = "moe_router_num_groups" if groups else "moe_router_group_topk"
        refuse(field, groups or chosen, "0, or the other beside it", "a token visits some groups of all")
    number = model.num_experts or 1
    if number % groups:
        why = f"a layer has {number} experts"
        refuse("moe_router_num_groups", groups, f"one of {divisors(number)}", why)
    fewest = -(-model.moe_router_topk * groups // number)
    if not fewest <= chosen <= groups:
        why = f"a token visits {model.moe_router_topk} of {number} experts in {groups} groups"
        refuse("moe_router_group_topk", chosen, f"{fewest} to {groups}", why)
    if model.moe_router_score_function != "softmax":
        why = f"DeepSeek-V3's rule of groups ({where('moe_router_num_groups')}) is not built"
        refuse("moe_router_score_function", model.moe_router_score_function, "softmax", why)
