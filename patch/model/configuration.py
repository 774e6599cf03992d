"""Upstream's configuration of a model, from its shape, its traits and how it is computed."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from patch.compat.corrections import StageLayout
from patch.config.execution import Execution
from patch.config.schema import ModelConfig
from patch.device import torch_dtype
from patch.families import expert_layers, traits_of
from patch.layout.pipeline_stages import smallest_micro_batch_group, split_layers
from patch.model.hf_order import batch_first_silu, bloom_gelu
from patch.model.mlp import activation_called
from patch.model.te_scales import scaling_settings


def transformer_config(
    model: ModelConfig,
    groups: ProcessGroupCollection,
    execution: Execution,
    *,
    cuda: bool,
    aligned: frozenset[str] = frozenset(),
) -> TransformerConfig:
    """Upstream's configuration of a model. Fusions that need CUDA extensions are off.

    Args:
        model: the shape of the whole model.
        groups: megatron-core's process groups, which set the sizes of TP, PP and CP.
        execution: how the model is computed.
        cuda: whether the weights are on a GPU.
        aligned: the operations (of `sources_of`) in Hugging Face's order.
    """
    dtype, traits = torch_dtype(execution.facts.kept_as), traits_of(model)
    activation = activation_called(traits.activation)
    if "swiglu" in aligned and traits.activation == "silu":
        activation = batch_first_silu
    elif "gelu" in aligned:
        activation = bloom_gelu
    kind = TransformerConfig if model.kv_lora_rank is None else MLATransformerConfig
    return kind(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        layernorm_epsilon=model.norm_epsilon,
        normalization=traits.normalization,
        gated_linear_unit=traits.gated_linear_unit,
        activation_func=activation,
        add_bias_linear=traits.add_bias_linear,
        add_qkv_bias=traits.add_qkv_bias,
        qk_layernorm=traits.qk_layernorm,
        hidden_dropout=0.0,
        params_dtype=dtype,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=groups.tp.size(),
        context_parallel_size=groups.cp.size(),
        cp_comm_type=execution.cp_comm_type,
        sequence_parallel=execution.sequence_parallel and groups.tp.size() > 1,
        calculate_per_token_loss=True,
        deterministic_mode=execution.deterministic_mode,
        use_cpu_initialization=not cuda,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **_attention_settings(model),
        **_expert_settings(model, execution, groups, aligned),
        **_layer_settings(model, execution, dtype, aligned, cuda=cuda),
        **_recompute_settings(execution),
        **_pipeline_settings(model.num_layers, groups.pp, execution),
    )


def _attention_settings(model: ModelConfig) -> dict[str, Any]:
    """The fields of upstream's configuration for attention, with the scale of latent attention's scores."""
    settings: dict[str, Any] = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "window_size": model.window_size,
        "attention_dropout": 0.0,
    }
    if model.kv_lora_rank is None:
        return settings
    is_yarn = model.use_rope_scaling and model.rope_scaling_type == "yarn"
    return settings | {
        # Our stage gives RoPE's table to this attention as to any other.
        "multi_latent_attention": False,
        "q_lora_rank": model.q_lora_rank,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_head_dim,
        "qk_pos_emb_head_dim": model.qk_pos_emb_head_dim,
        "v_head_dim": model.v_head_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": model.rope_scaling_factor if is_yarn else 1.0,
        "mscale_all_dim": model.mscale_all_dim or 0.0,
    }


def _expert_settings(
    model: ModelConfig, execution: Execution, groups: ProcessGroupCollection, aligned: frozenset[str]
) -> dict[str, Any]:
    """The fields of upstream's configuration for experts; the divisor of their losses is Router's."""
    layers = expert_layers(model)
    if not layers:
        return {}
    settings, numbers = execution.experts, range(model.num_layers)
    return {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.expert_width,
        "moe_shared_expert_intermediate_size": model.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
        "moe_layer_freq": 1 if len(layers) == len(numbers) else [int(n in layers) for n in numbers],
        "moe_router_topk": model.moe_router_topk,
        "moe_router_score_function": model.moe_router_score_function,
        "moe_router_pre_softmax": model.moe_router_pre_softmax or "experts" in aligned,
        "moe_router_topk_scaling_factor": model.moe_router_topk_scaling_factor,
        "moe_router_num_groups": model.moe_router_num_groups,
        "moe_router_group_topk": model.moe_router_group_topk,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": settings.moe_router_load_balancing_type,
        "moe_aux_loss_coeff": settings.moe_aux_loss_coeff,
        "moe_z_loss_coeff": settings.moe_z_loss_coeff or None,
        "moe_expert_capacity_factor": settings.moe_expert_capacity_factor,
        "moe_token_dispatcher_type": settings.moe_token_dispatcher_type,
        "expert_model_parallel_size": groups.ep.size(),
        "expert_tensor_parallel_size": groups.expt_tp.size(),
    }


def _layer_settings(
    model: ModelConfig, execution: Execution, dtype: torch.dtype, aligned: frozenset[str], *, cuda: bool
) -> dict[str, Any]:
    """The fields of upstream's configuration that differ between our layers and Transformer Engine's.

    Of our 8-bit products (eight_bit_product.py) upstream knows nothing.
    """
    if model.transformer_impl != "transformer_engine":
        overlaps = execution.tp_comm_overlap  # of tensor parallelism's messages with products
        return {
            "transformer_impl": "local",
            "tp_comm_overlap": not cuda if overlaps is None else overlaps,  # else resolved
            "recompute_modules": _recomputed_modules(dtype, aligned, cuda=cuda),
        }
    # Its norms are parts of its linear layers, its messages overlap only through user buffers (not set up).
    settings = {"transformer_impl": "transformer_engine", "tp_comm_overlap": False, "recompute_modules": []}
    return settings | scaling_settings(execution)


def _recomputed_modules(dtype: torch.dtype, aligned: frozenset[str], *, cuda: bool) -> list[str]:
    """Upstream's `recompute_modules` for AC=sel: what is large and cheap, but no matrix product.

        norms        outputs (upstream's `layernorm`), except in fp32 on a CPU and with --precision-align
        activation   the product of silu(gate) and up: one of an MLP's three widths (mlp.py)
        attention    only with --precision-align, where the eager one keeps its scores (`core_attn`)

    Fused attention keeps no scores, so recomputing it, as upstream does by default, saves nothing.
    Norms are left out if torch computes them by several operations, each of which adds a gradient to the
    norm's input. If they were recomputed, these gradients would be summed before the residual's gradient is
    added instead of after it, which gives other bits.

    Args:
        dtype: the dtype of activations.
        aligned: the operations (of `sources_of`) in Hugging Face's order.
        cuda: whether the model is on a GPU.
    """
    is_one_operation = "rmsnorm" not in aligned and (cuda or dtype != torch.float32)
    attention = ["core_attn"] if "attention" in aligned else []
    return [*attention, "layernorm"] if is_one_operation else attention


def _recompute_settings(execution: Execution) -> dict[str, Any]:
    """The fields of upstream's configuration for recomputation, except the modules of `selective`."""
    granularity = execution.recompute_granularity
    if granularity != "full":
        return {"recompute_granularity": granularity}
    if execution.recompute_method == "block":  # such layers recompute themselves (activation_layers.py)
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": execution.recompute_num_layers,
    }


def _pipeline_settings(
    num_layers: int, pp: torch.distributed.ProcessGroup, execution: Execution
) -> dict[str, Any]:
    """The fields of upstream's configuration for pipeline stages and their communication."""
    pp_size = pp.size()
    stage_layers = list(execution.stage_layers or split_layers(num_layers, pp_size))
    vp_size = len(stage_layers) // pp_size
    is_interleaved = vp_size > 1
    is_even = len(set(stage_layers)) == 1
    overlaps = is_interleaved and execution.overlap_p2p_communication
    count = execution.num_micro_batches
    group = execution.micro_batch_group or smallest_micro_batch_group(count, pp_size)
    return {
        "pipeline_model_parallel_size": pp_size,
        "pipeline_model_parallel_layout": None if is_even else StageLayout(stage_layers, pp_size, pp.rank()),
        "virtual_pipeline_model_parallel_size": vp_size if is_interleaved else None,
        "microbatch_group_size_per_vp_stage": group if is_interleaved else None,
        # Interleaved over two processes, both neighbours are the same process, and in one batch of sends and
        # receives a gradient could be received as an activation. So they are sent singly, as in Megatron-LM;
        # in batches, which do not overlap, only among three processes (`messages_can_travel`).
        "overlap_p2p_comm": overlaps,
        "overlap_p2p_comm_warmup_flush": overlaps and execution.overlap_p2p_communication_warmup_flush,
        "batch_p2p_comm": not overlaps,
        # Upstream's default makes the host wait for the whole GPU after each batch, because of a fault of old
        # versions of torch (model_parallel_config.py:307): `wait` waited for nothing (pytorch#68866). Since
        # 1.13 (pytorch#82450) it makes the compute stream wait for the batch, as for single messages.
        "batch_p2p_sync": False,
        # A send that overlaps with computation may still read the output when upstream frees it. Over gloo
        # this gave wrong losses.
        "deallocate_pipeline_outputs": not overlaps,
    }
