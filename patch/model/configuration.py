"""megatron-core's TransformerConfig of a run."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from patch.compat.corrections import StageLayout
from patch.config.choices import PRECISIONS
from patch.config.schema import ModelConfig, RunConfig
from patch.device import torch_dtype
from patch.families import EXPERT_FIELDS, expert_layers, layers_with_window, traits_of
from patch.families.shape import LATENT_SIZES
from patch.model.hf_numerics.layers import batch_first_silu, bloom_gelu
from patch.model.mlp import activation_called
from patch.model.te_scales import scaling_settings


def transformer_config(
    config: RunConfig,
    groups: ProcessGroupCollection,
    *,
    cuda: bool,
    aligned: frozenset[str] = frozenset(),
) -> TransformerConfig:
    """Return megatron-core's configuration of a run's model. Fusions that need CUDA extensions are off.

    `aligned` are the operations (from `sources_of`) in Hugging Face's order.
    """
    model, parallel, training = config.model, config.parallel, config.training
    dtype, traits = torch_dtype(PRECISIONS[training.precision].kept_as), traits_of(model)
    activation = activation_called(traits.activation)
    if "swiglu" in aligned and traits.activation == "silu":
        activation = batch_first_silu
    elif "gelu" in aligned:
        activation = bloom_gelu
    kind = MLATransformerConfig if model.is_latent else TransformerConfig
    return kind(
        **_same(model, "num_layers", "hidden_size", "ffn_hidden_size"),
        **_same(traits, "normalization", "gated_linear_unit", "add_bias_linear"),
        **_same(traits, "layernorm_zero_centered_gamma", "rotary_interleaved"),
        **_same(traits, "add_qkv_bias", "qk_layernorm"),
        layernorm_epsilon=model.norm_epsilon,
        activation_func=activation,
        hidden_dropout=0.0,
        params_dtype=dtype,
        fp16=dtype == torch.float16,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=groups.tp.size(),
        context_parallel_size=groups.cp.size(),
        cp_comm_type=parallel.cp_comm_type,
        sequence_parallel=parallel.sequence_parallel and groups.tp.size() > 1,
        calculate_per_token_loss=True,
        deterministic_mode=training.deterministic_mode,
        use_cpu_initialization=not cuda,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **_attention_settings(model),
        **_expert_settings(config, groups, aligned),
        **_layer_settings(config, dtype, aligned, cuda=cuda),
        **_recompute_settings(config),
        **_pipeline_settings(config, groups.pp),
    )


def _same(section: Any, *names: str) -> dict[str, Any]:
    """Return the fields that have the same name in megatron-core."""
    return {name: getattr(section, name) for name in names}


def _attention_settings(model: ModelConfig) -> dict[str, Any]:
    settings: dict[str, Any] = {
        **_same(model, "num_attention_heads", "num_query_groups", "kv_channels", "window_size"),
        **_same(model, "softmax_scale"),
        "window_attn_skip_freq": [int(n in layers_with_window(model)) for n in range(model.num_layers)],
        "attention_dropout": 0.0,
    }
    if not model.is_latent:
        return settings
    is_yarn = model.use_rope_scaling and model.rope_scaling_type == "yarn"
    return settings | {
        # LlamaModel passes RoPE's table to latent attention too.
        "multi_latent_attention": False,
        **_same(model, *LATENT_SIZES),
        "rope_type": "rope",
        "rotary_scaling_factor": model.rope_scaling_factor if is_yarn else 1.0,
        "mscale_all_dim": model.mscale_all_dim or 0.0,
    }


def _expert_settings(
    config: RunConfig, groups: ProcessGroupCollection, aligned: frozenset[str]
) -> dict[str, Any]:
    """Return the fields for experts; Router sets the divisor of the expert losses."""
    model, settings = config.model, config.experts
    layers, numbers = expert_layers(model), range(model.num_layers)
    if not layers:
        return {}
    same = _same(model, *EXPERT_FIELDS - {"num_experts"}) | _same(settings, *settings.__slots__)
    return same | {
        "num_moe_experts": model.num_experts,
        "moe_ffn_hidden_size": model.expert_width,
        "moe_layer_freq": 1 if len(layers) == len(numbers) else [int(n in layers) for n in numbers],
        "moe_router_pre_softmax": model.moe_router_pre_softmax or "experts" in aligned,
        "moe_router_dtype": "fp32",
        "moe_z_loss_coeff": settings.moe_z_loss_coeff or None,
        "expert_model_parallel_size": groups.ep.size(),
        "expert_tensor_parallel_size": groups.expt_tp.size(),
    }


def _layer_settings(
    config: RunConfig, dtype: torch.dtype, aligned: frozenset[str], *, cuda: bool
) -> dict[str, Any]:
    """Return the fields that differ between our layers and TE's; our products need no field."""
    if config.model.transformer_impl != "transformer_engine":
        overlaps = config.parallel.tp_comm_overlap
        return {
            "transformer_impl": "local",
            "tp_comm_overlap": not cuda if overlaps is None else overlaps,  # on CUDA a run has resolved None
            "recompute_modules": _recomputed_modules(dtype, aligned, cuda=cuda),
        }
    # TE fuses norms into linear layers. Its TP overlap needs user buffers, which are not set up here.
    settings = {"transformer_impl": "transformer_engine", "tp_comm_overlap": False, "recompute_modules": []}
    return settings | scaling_settings(config)


def _recomputed_modules(dtype: torch.dtype, aligned: frozenset[str], *, cuda: bool) -> list[str]:
    """Return `recompute_modules` for AC=sel: large outputs of cheap operations, no matrix product."""
    # `layernorm`: not if torch computes a norm by several operations, each of which adds a gradient to the
    # norm's input. Recomputation would sum these gradients before the residual's gradient is added instead
    # of after it, which gives other bits.
    # `core_attn`: only eager attention keeps scores; fused attention keeps none, so nothing would be saved.
    # The MLP's activation (one of the MLP's three widths) is recomputed by mlp.py.
    is_one_operation = "rmsnorm" not in aligned and (cuda or dtype != torch.float32)
    attention = ["core_attn"] if "attention" in aligned else []
    return [*attention, "layernorm"] if is_one_operation else attention


def _recompute_settings(config: RunConfig) -> dict[str, Any]:
    granularity, training = config.recompute, config.training
    if granularity != "full":
        return {"recompute_granularity": granularity}
    if training.recompute_method == "block":  # RecomputedLayer does it (activation_layers.py)
        return {}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": training.recompute_num_layers,
    }


def _pipeline_settings(config: RunConfig, pp: torch.distributed.ProcessGroup) -> dict[str, Any]:
    pp_size, stage_layers = pp.size(), config.stage_layers
    vp_size = len(stage_layers) // pp_size
    is_interleaved = vp_size > 1
    is_even = len(set(stage_layers)) == 1
    overlaps = is_interleaved and config.parallel.overlap_p2p_communication
    return {
        "pipeline_model_parallel_size": pp_size,
        "pipeline_model_parallel_layout": None if is_even else StageLayout(stage_layers, pp_size, pp.rank()),
        "virtual_pipeline_model_parallel_size": vp_size if is_interleaved else None,
        "microbatch_group_size_per_vp_stage": config.micro_batch_group if is_interleaved else None,
        # With two interleaved pipeline ranks, both neighbors are the same rank. In a batch of sends and
        # receives, a gradient could be received as an activation. So each message is sent alone, as in
        # Megatron-LM. Batches, which do not overlap, need three or more ranks (`p2p_overlap_is_possible`).
        "overlap_p2p_comm": overlaps,
        "overlap_p2p_comm_warmup_flush": overlaps and config.parallel.overlap_p2p_communication_warmup_flush,
        "batch_p2p_comm": not overlaps,
        # megatron-core's default synchronizes the GPU after each batch (model_parallel_config.py:307),
        # because `wait` did not wait in old torch versions (pytorch#68866). Since torch 1.13
        # (pytorch#82450) `wait` makes the compute stream wait for the batch.
        "batch_p2p_sync": False,
        # An overlapped send may still read the output when megatron-core frees it. With gloo this gave
        # wrong losses.
        "deallocate_pipeline_outputs": not overlaps,
    }
