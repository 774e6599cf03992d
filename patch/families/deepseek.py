"""DeepSeek-V2 and V2-Lite: latent attention, grouped and shared experts, dense first layers.

Sources: arXiv:2405.04434; the config.json that DeepSeek publishes with each model on Hugging Face.
"""

from __future__ import annotations

from collections.abc import Set
from functools import partial
from typing import Any

from patch.families.config_json import ConfigReader
from patch.families.experts import ExpertsFamily, rows_named
from patch.families.layers import expert_layers
from patch.families.shape import ModelConfig, Traits, preset

_LATENT_KEYS = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_GROUPS = {"moe_router_num_groups": "n_group", "moe_router_group_topk": "topk_group"}
_METHODS = {False: "greedy", True: "group_limited_greedy"}
"""Whether experts are grouped -> `topk_method`."""


class _DeepSeek(ExpertsFamily):
    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        sizes = {name: config.integer(key) for name, key in _LATENT_KEYS.items()}
        query = config.values["q_lora_rank"]
        shared = config.integer("n_shared_experts")
        all_sizes = {_LATENT_KEYS[name]: size for name, size in sizes.items()} | {"n_shared_experts": shared}
        if query is not None:
            all_sizes["q_lora_rank"] = config.integer("q_lora_rank")
        for key, size in all_sizes.items():
            if size < 1:
                config.refuse(key, size, "at least 1")
        heads = config.integer("num_attention_heads")
        if config.integer("num_key_value_heads", heads) != heads:
            expected = f"{heads}: each head has a key and a value"
            config.refuse("num_key_value_heads", config.values["num_key_value_heads"], expected)
        # The file's own head_dim is the width that RoPE rotates.
        head = {"head_dim": sizes["qk_head_dim"] + sizes["qk_pos_emb_head_dim"]}
        fields = super().read_config(ConfigReader(config.file, {**config.values, **head}))
        if fields.get("rope_scaling_type", "yarn") != "yarn":
            config.refuse("rope_type", fields["rope_scaling_type"], "default or yarn")
        factor = config.number("routed_scaling_factor")
        return {
            **fields,
            **sizes,
            **_mscales(config, fields),
            **_groups(config),
            "q_lora_rank": query,
            "moe_shared_expert_intermediate_size": shared * fields["moe_ffn_hidden_size"],
            "moe_router_topk_scaling_factor": None if factor == 1 else factor,
        }

    def _expert_layers(self, config: ConfigReader, num_layers: int) -> list[int]:
        first = config.integer("first_k_dense_replace")
        if not 0 <= first < num_layers:
            config.refuse("first_k_dense_replace", first, f"0 to {num_layers - 1}: some layer has experts")
        return list(range(first, num_layers))

    def computes(self, model: ModelConfig) -> bool:
        with_experts, shared = expert_layers(model), model.moe_shared_expert_intermediate_size
        is_other = model.use_rope_scaling and model.rope_scaling_type != "yarn"
        return bool(
            model.kv_lora_rank
            and with_experts
            and len(with_experts) == model.num_layers - with_experts[0]
            and with_experts[-1] == model.num_layers - 1
            and shared
            and shared % model.expert_width == 0
            and not model.moe_shared_expert_gate
            and model.moe_router_pre_softmax
            and model.moe_router_score_function == "softmax"
            and model.num_query_groups == model.num_attention_heads
            and not is_other
        )

    def write_shape(self, described: dict[str, Any], model: ModelConfig, fields: Set[str]) -> None:
        head = {"head_dim": model.qk_pos_emb_head_dim} if "head_dim" in described else {}
        super().write_shape(described, model, fields)
        described.pop("head_dim", None)
        described |= head
        sizes = {**_LATENT_KEYS, "q_lora_rank": "q_lora_rank"}
        described |= {key: getattr(model, name) for name, key in sizes.items() if name in fields}
        if fields & {"moe_shared_expert_intermediate_size", "moe_ffn_hidden_size"}:
            shared = model.moe_shared_expert_intermediate_size or 0
            described["n_shared_experts"] = shared // model.expert_width
        if "moe_router_topk_scaling_factor" in fields:
            described["routed_scaling_factor"] = model.moe_router_topk_scaling_factor or 1.0
        if fields & _GROUPS.keys():
            described |= {key: getattr(model, name) or 1 for name, key in _GROUPS.items()}
            described["topk_method"] = _METHODS[model.moe_router_group_topk is not None]

    def _write_layers(self, described: dict[str, Any], dense: list[int]) -> None:
        described["first_k_dense_replace"] = len(dense)


def _groups(config: ConfigReader) -> dict[str, int]:
    """Fields of expert groups; a rule checks the numbers."""
    method = config.values["topk_method"]
    if method not in _METHODS.values():
        config.refuse("topk_method", method, " or ".join(_METHODS.values()))
    return {} if method == _METHODS[False] else {name: config.integer(key) for name, key in _GROUPS.items()}


def _mscales(config: ConfigReader, fields: dict[str, Any]) -> dict[str, float | None]:
    """YaRN's two mscale values unchanged, because the scale of attention scores needs `mscale_all_dim`."""
    if not fields["use_rope_scaling"]:
        return {}
    rope = config.values.get("rope_scaling") or config.values["rope_parameters"]
    inner = ConfigReader(config.file, rope)
    factor = None if rope.get("attention_factor") is None else inner.number("attention_factor")
    numbers = {name: inner.number(name, 0.0) or None for name in ("mscale", "mscale_all_dim")}
    return {**numbers, "yarn_attention_factor": factor}


def _shape(layers: int, hidden: int, ffn: int, heads: int, experts: int, width: int, **own: Any) -> Any:
    return preset(
        layers, hidden, ffn, heads, kv_channels=192, vocab_size=102400, norm_epsilon=1e-6,
        max_position_embeddings=163840, rotary_base=1e4, untie_embeddings_and_output_weights=True,
        use_rope_scaling=True, rope_scaling_type="yarn", rope_scaling_factor=40.0,
        rope_original_max_position=4096, mscale=0.707, mscale_all_dim=0.707, kv_lora_rank=512,
        qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, num_experts=experts, moe_router_topk=6,
        moe_ffn_hidden_size=width, moe_shared_expert_intermediate_size=2 * width,
        moe_layer_freq=f"[0]*1+[1]*{layers - 1}", moe_router_pre_softmax=True, **own,
    )  # fmt: skip


DEEPSEEK_V2 = _DeepSeek(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    traits=Traits(),
    type_keys=lambda model: {"attention_bias": False, "mlp_bias": False},
    rows=partial(rows_named, {"mlp.shared_expert.": "mlp.shared_experts."}),
    expert_keys={
        "num_experts": "n_routed_experts",
        "moe_router_topk": "num_experts_per_tok",
        "moe_ffn_hidden_size": "moe_intermediate_size",
    },
    own_of_router=frozenset({"logits", "weights", "unsorted"}),
    presets={
        "deepseek-v2-lite": _shape(27, 2048, 10944, 16, 64, 1408),
        "deepseek-v2": _shape(
            60, 5120, 12288, 128, 160, 1536, q_lora_rank=1536, moe_router_num_groups=8,
            moe_router_group_topk=3, moe_router_topk_scaling_factor=16.0,
        ),
    },
)  # fmt: skip
