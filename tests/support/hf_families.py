"""A tiny random transformers model of each family, saved like a user's folder."""

import json
from pathlib import Path
from typing import Any

from small_runs import small_run

from patch.config.schema import RunConfig
from patch.preflight.model_of_folder import read_hf_config

SHAPE: dict[str, Any] = {
    "vocab_size": 250, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.05, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip


_YARN_ROPE = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
    "attention_factor": 1.3,
}  # fmt: skip


def _plain_rope(theta: float) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta}


_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "moe_intermediate_size": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
        "mscale": 1.0, "mscale_all_dim": 0.7,
    },
}  # fmt: skip


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1": (
        "Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_parameters": _plain_rope(1e4)}
    ),
    "llama-2-70B": ("Llama", {"rms_norm_eps": 1e-5, "rope_parameters": _plain_rope(1e4)}),
    "llama-3": ("Llama", {"rms_norm_eps": 1e-5, "rope_parameters": _plain_rope(5e5)}),
    "llama-3.1": ("Llama", {"rms_norm_eps": 1e-5, "rope_parameters": _llama3_rope(8.0)}),
    "llama-3.2": (
        "Llama", {"rms_norm_eps": 1e-5, "rope_parameters": _llama3_rope(32.0), "tie_word_embeddings": True}
    ),
    "llama-biased": (
        "Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": _plain_rope(1e4)}
    ),
    "llama-yarn": ("Llama", {"rms_norm_eps": 1e-5, "rope_parameters": _YARN_ROPE}),
    "mistral-0.1": (
        "Mistral", {"sliding_window": 16, "rms_norm_eps": 1e-5, "rope_parameters": _plain_rope(1e4)}
    ),
    "mistral-nemo": (
        "Mistral",
        {"sliding_window": None, "head_dim": 32, "rms_norm_eps": 1e-5, "rope_parameters": _plain_rope(1e6)},
    ),
    "qwen-2": ("Qwen2", {"rope_parameters": _plain_rope(1e6)}),
    "qwen-2-sliding": (
        "Qwen2",
        {
            "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0,
            "rope_parameters": _plain_rope(1e6),
        },
    ),
    "qwen-2.5": ("Qwen2", {"rope_parameters": _plain_rope(1e6), "tie_word_embeddings": True}),
    "qwen-3": (
        "Qwen3", {"head_dim": 32, "rope_parameters": _plain_rope(1e6), "tie_word_embeddings": True}
    ),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "rope_parameters": _plain_rope(2e6)}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 3.0,
            "attention_multiplier": 0.1, "tie_word_embeddings": True, "rope_parameters": _plain_rope(1e4),
        },
    ),
    "ministral-3": (
        "Ministral3", {"head_dim": 32, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 8,
            "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        }},
    ),
    "phi-3": ("Phi3", {"sliding_window": 16, "rope_parameters": _plain_rope(1e4)}),
    "phi-4-mini": (
        "Phi3",
        {
            "sliding_window": None, "tie_word_embeddings": True,
            "rope_parameters": _plain_rope(1e4) | {"partial_rotary_factor": 0.75},
        },
    ),
    "olmo-2": ("Olmo2", {"rope_parameters": _plain_rope(5e5)}),
    "olmo-3": (
        "Olmo3",
        {
            "num_hidden_layers": 4, "sliding_window": 8,
            "rope_parameters": {
                "full_attention": _YARN_ROPE | {"rope_theta": 5e5}, "sliding_attention": _plain_rope(5e5),
            },
        },
    ),
    "glm-4": (
        "Glm4",
        {"attention_bias": False, "rope_parameters": _plain_rope(1e4) | {"partial_rotary_factor": 0.5}},
    ),
    "glm-4-biased": (
        "Glm4", {"head_dim": 32, "rope_parameters": _plain_rope(1e4) | {"partial_rotary_factor": 0.5}}
    ),
    "gemma-2": (
        "Gemma2",
        {
            "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24, "final_logit_softcapping": 3.0,
            "attn_logit_softcapping": 2.0, "rope_parameters": _plain_rope(1e4),
        },
    ),
    "gemma-3": (
        "Gemma3",
        {
            "num_hidden_layers": 3, "head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": _plain_rope(1e4),
            },
        },
    ),
    "bloom": ("Bloom", {"n_layer": 2, "n_head": 6, "hidden_size": 48, "tie_word_embeddings": True}),
}  # fmt: skip
"""Name -> class prefix in transformers, special configuration. LLaMA 3.3 has the configuration of 3.1."""
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "rope_parameters": _plain_rope(1e6)}),
    "qwen-2-moe": (
        "Qwen2Moe",
        {
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 80, "rope_parameters": _plain_rope(1e6),
        },
    ),
    "qwen-2-moe-mixed": (
        "Qwen2Moe",
        {
            "num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "norm_topk_prob": True,
            "shared_expert_intermediate_size": 32, "mlp_only_layers": [0], "num_hidden_layers": 3,
            "rope_parameters": _plain_rope(1e6),
        },
    ),
    "qwen-3-moe": (
        "Qwen3Moe",
        {
            "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 32,
            "norm_topk_prob": True, "rope_parameters": _plain_rope(1e6), "tie_word_embeddings": True,
        },
    ),
    "deepseek-v2-lite": (
        "DeepseekV2",
        {**_DEEPSEEK, "q_lora_rank": None, "num_hidden_layers": 3, "first_k_dense_replace": 1},
    ),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **_DEEPSEEK, "q_lora_rank": 40, "topk_method": "group_limited_greedy", "n_group": 4,
            "topk_group": 2, "routed_scaling_factor": 4.0,
        },
    ),
    "moonlight": (
        "DeepseekV3",
        {
            **_DEEPSEEK, "q_lora_rank": None, "num_hidden_layers": 3, "first_k_dense_replace": 1,
            "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.446, "num_mtp_layers": 0,
            "rope_parameters": _plain_rope(5e4),
        },
    ),
    "glm-4.5": (
        "Glm4Moe",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16,
            "attention_bias": True, "use_qk_norm": True, "num_mtp_layers": 0,
            "rope_parameters": _plain_rope(1e6) | {"partial_rotary_factor": 0.5},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            **_DEEPSEEK, "q_lora_rank": 40, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 0,
            "n_shared_experts": 1, "num_mtp_layers": 0,
        },
    ),
}  # fmt: skip
"""Families with experts. In three of them the first layer has none."""

WITHOUT_CLASS = ("internlm2", "baichuan")
"""Families whose class is code in their folders: tests/unit/convert/test_without_class.py."""
OTHERS = {"arcee": ("Arcee", {"rope_parameters": _plain_rope(1e4)})}
"""A family that the project does not know, for tests that register it."""


def spell_as_4(folder: Path) -> None:
    """Write config.json in the spelling of transformers 4, which nearly all published models have."""
    path = folder / "config.json"
    described = json.loads(path.read_text())
    rope = described.pop("rope_parameters", None)
    if rope and "full_attention" in rope:
        if described["model_type"] == "gemma3_text":
            described["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if rope:
        described["rope_theta"] = rope.pop("rope_theta")
        if (share := rope.pop("partial_rotary_factor", None)) is not None:
            described["partial_rotary_factor"] = share
        described["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    described["torch_dtype"] = described.pop("dtype")
    if described["model_type"] == "qwen3_moe":
        described["num_experts"] = described.pop("num_local_experts")
    path.write_text(json.dumps(described, indent=2) + "\n")


def family_model(
    name: str, folder: Path | None = None, *, dtype: Any = None, spelling: int = 4, **changes: Any
) -> Any:
    """Return the model with random weights, including norms and biases; save it to `folder` if given.

    Args:
        spelling: version of transformers whose config.json is written.
        changes: changes of the configuration, and `max_shard_size`.
    """
    import torch
    import transformers

    prefix, own = {**FAMILIES, **MIXTURES, **OTHERS}[name]
    max_shard_size = changes.pop("max_shard_size", "5GB")
    known = getattr(transformers, f"{prefix}TextConfig", None) or getattr(transformers, f"{prefix}Config")
    shape = {name: value for name, value in SHAPE.items() if hasattr(known, name)}
    config = known(**{**shape, **own, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.05)
    model = model.to(dtype or torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # float32 in published folders
            buffer.data = buffer.float()
    if folder is not None:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
        if spelling == 4:
            spell_as_4(folder)
    return model.eval()


def family_run(folder: Path, tp: int = 1, pp: int = 1, dp: int = 1, **changes: Any) -> RunConfig:
    """Return a run of the model whose config.json is in `folder`."""
    return small_run(tp, pp, dp, **{**read_hf_config(folder), **changes})
