"""DeepSeek-V2, V3 and their relatives: latent attention, grouped and shared experts, dense first layers.

Sources: arXiv:2405.04434, arXiv:2412.19437; the config.json that is published with each model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from patch.families.config_json import ConfigReader
from patch.families.experts import ExpertsFamily
from patch.families.family import Family
from patch.families.layers import expert_layers
from patch.families.shape import ModelConfig, RouterScore, Traits, preset
from patch.families.weights import WeightRow, rows_named

_LATENT_KEYS = {
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_EXPERT_KEYS = {
    "num_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
_ROWS = partial(rows_named, {"mlp.shared_expert.": "mlp.shared_experts."})
_GROUPS = {"moe_router_num_groups": "n_group", "moe_router_group_topk": "topk_group"}
_METHODS = {False: "greedy", True: "group_limited_greedy"}
"""Whether experts of DeepSeek-V2 are grouped -> `topk_method`."""


class BlockScales(NamedTuple):
    """How a folder stores weights in 8 bits: each block of a matrix has a scale. They are read as BF16."""

    method: str
    """`quant_method` in config.json."""
    dtype: str
    """In safetensors' spelling."""
    suffix: str
    """End of the name of a weight's scales."""
    size: int
    """Rows and columns of a block; the last block may be smaller."""


BLOCK_SCALES = BlockScales("fp8", "F8_E4M3", "_scale_inv", 128)


@dataclass(frozen=True, kw_only=True)
class DeepSeekExperts(ExpertsFamily):
    """A family with DeepSeek's experts; with sigmoid scores the router is that of DeepSeek-V3."""

    score: RouterScore = "sigmoid"
    rows: Callable[[ModelConfig, Traits], tuple[WeightRow, ...]] = _ROWS
    sizes: Mapping[str, str] = field(default_factory=lambda: _EXPERT_KEYS)
    own_of_router: Set[str] = frozenset({"logits", "weights", "unsorted"})

    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """Return ModelConfig's fields; see Family."""
        shared = config.integer("n_shared_experts", at_least=1)
        factor = config.number("routed_scaling_factor")
        _check_quantization(config)
        fields = super().read_config(config)
        of_v3 = {"moe_router_pre_softmax": False} if self.score == "sigmoid" else {}
        if of_v3 and fields["moe_router_topk"] == 1:
            expected = "at least 2: the weight of a single expert is always 1"
            config.refuse("num_experts_per_tok", 1, expected)
        return {
            **fields,
            **of_v3,
            **self._groups(config),
            "moe_router_score_function": self.score,
            "moe_router_enable_expert_bias": self.score == "sigmoid",
            "moe_shared_expert_intermediate_size": shared * fields["moe_ffn_hidden_size"],
            "moe_router_topk_scaling_factor": None if factor == 1 else factor,
        }

    def _groups(self, config: ConfigReader) -> dict[str, int]:
        """Fields of expert groups; a rule checks the numbers."""
        if self.score == "sigmoid":
            is_grouped = config.integer("n_group") > 1
        else:
            method = config.values["topk_method"]
            if method not in _METHODS.values():
                config.refuse("topk_method", method, " or ".join(_METHODS.values()))
            is_grouped = method == _METHODS[True]
        return {name: config.integer(key) for name, key in _GROUPS.items()} if is_grouped else {}

    def _expert_layers(self, config: ConfigReader, num_layers: int) -> list[int]:
        first = config.integer("first_k_dense_replace")
        if not 0 <= first < num_layers:
            config.refuse("first_k_dense_replace", first, f"0 to {num_layers - 1}: some layer has experts")
        return list(range(first, num_layers))

    def computes(self, model: ModelConfig) -> bool:
        """Return whether the class in transformers computes a model with these experts."""
        with_experts = expert_layers(model) if Family.computes(self, model) else ()
        shared = model.moe_shared_expert_intermediate_size
        is_sigmoid = self.score == "sigmoid"
        return bool(
            with_experts
            and len(with_experts) == model.num_layers - with_experts[0]
            and with_experts[-1] == model.num_layers - 1
            and shared
            and shared % model.expert_width == 0
            and not model.moe_shared_expert_gate
            and model.moe_router_score_function == self.score
            and model.moe_router_enable_expert_bias is is_sigmoid
            and (model.moe_router_topk > 1 if is_sigmoid else model.moe_router_pre_softmax)
        )

    def write_shape(self, described: dict[str, Any], model: ModelConfig, fields: Set[str]) -> None:
        """Set the keys of config.json that depend on some fields of the model; see Family."""
        super().write_shape(described, model, fields)
        if fields & {"moe_shared_expert_intermediate_size", "moe_ffn_hidden_size"}:
            shared = model.moe_shared_expert_intermediate_size or 0
            described["n_shared_experts"] = shared // model.expert_width
        if "moe_router_topk_scaling_factor" in fields:
            described["routed_scaling_factor"] = model.moe_router_topk_scaling_factor or 1.0
        if fields & _GROUPS.keys():
            described |= {key: getattr(model, name) or 1 for name, key in _GROUPS.items()}
            if self.score == "softmax":
                described["topk_method"] = _METHODS[model.moe_router_group_topk is not None]
        if self.score == "sigmoid":
            described["norm_topk_prob"] = True

    def _write_layers(self, described: dict[str, Any], dense: list[int]) -> None:
        described["first_k_dense_replace"] = len(dense)


class _DeepSeek(DeepSeekExperts):
    """DeepSeek's experts after latent attention."""

    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        query = config.values["q_lora_rank"]
        for key in (*_LATENT_KEYS.values(), *(["q_lora_rank"] if query is not None else [])):
            config.integer(key, at_least=1)
        heads = config.integer("num_attention_heads")
        if config.integer("num_key_value_heads", heads) != heads:
            expected = f"{heads}: each head has a key and a value"
            config.refuse("num_key_value_heads", config.values["num_key_value_heads"], expected)
        # The file's own head_dim is the width that RoPE rotates.
        head = {"head_dim": config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")}
        fields = super().read_config(ConfigReader(config.file, {**config.values, **head}))
        if fields.get("rope_scaling_type", "yarn") != "yarn":
            config.refuse("rope_type", fields["rope_scaling_type"], "default or yarn")
        return {**fields, "q_lora_rank": query}

    def computes(self, model: ModelConfig) -> bool:
        is_other = model.use_rope_scaling and model.rope_scaling_type != "yarn"
        has_groups = model.num_query_groups != model.num_attention_heads
        return not (is_other or has_groups) and super().computes(model)

    def write_shape(self, described: dict[str, Any], model: ModelConfig, fields: Set[str]) -> None:
        head = {"head_dim": model.qk_pos_emb_head_dim} if "head_dim" in described else {}
        super().write_shape(described, model, fields)
        described.pop("head_dim", None)
        described |= head


def _check_quantization(config: ConfigReader) -> None:
    """Refuse weights in other numbers than BLOCK_SCALES, which are read."""
    how = config.values.get("quantization_config") or {}
    kind = [how.get(key) for key in ("quant_method", "weight_block_size")] if isinstance(how, dict) else []
    method, block = BLOCK_SCALES.method, [BLOCK_SCALES.size] * 2
    if how and kind != [method, block]:
        config.refuse("quantization_config", how, f"none, or {method} with a weight_block_size of {block}")


def _shape(layers: int, hidden: int, ffn: int, heads: int, experts: int, width: int, **own: Any) -> Any:
    return preset(
        layers, hidden, ffn, heads, **{
            "kv_channels": 192, "vocab_size": 102400, "norm_epsilon": 1e-6, "max_position_embeddings": 163840,
            "rotary_base": 1e4, "untie_embeddings_and_output_weights": True, "kv_lora_rank": 512,
            "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "num_experts": experts,
            "moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": 2 * width,
            "moe_layer_freq": f"[0]*1+[1]*{layers - 1}", **own,
        },
    )  # fmt: skip


def _yarn(factor: float, mscale: float, **own: Any) -> dict[str, Any]:
    return {
        "use_rope_scaling": True, "rope_scaling_type": "yarn", "rope_scaling_factor": factor,
        "rope_original_max_position": 4096, "mscale": mscale, "mscale_all_dim": mscale, **own,
    }  # fmt: skip


_V2: dict[str, Any] = {**_yarn(40.0, 0.707), "moe_router_topk": 6, "moe_router_pre_softmax": True}
V3_ROUTER: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
"""Fields that all models with DeepSeek-V3's router share."""
_V3: dict[str, Any] = {**V3_ROUTER, "moe_router_topk": 8, "q_lora_rank": 1536}

_LATENT: Any = {"sizes": _EXPERT_KEYS | _LATENT_KEYS, "numbers": {"q_lora_rank": "q_lora_rank"}}

DEEPSEEK_V2 = _DeepSeek(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    **_LATENT,
    type_keys=lambda model: {"attention_bias": False, "mlp_bias": False},
    has_polar_rope=True,
    score="softmax",
    presets={
        "deepseek-v2-lite": _shape(27, 2048, 10944, 16, 64, 1408, **_V2),
        "deepseek-v2": _shape(
            60, 5120, 12288, 128, 160, 1536, **_V2, q_lora_rank=1536, moe_router_num_groups=8,
            moe_router_group_topk=3, moe_router_topk_scaling_factor=16.0,
        ),
    },
)  # fmt: skip

DEEPSEEK_V3 = _DeepSeek(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    **_LATENT,
    type_keys=lambda model: {"attention_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    presets={
        "moonlight-16B-A3B": _shape(
            27, 2048, 11264, 16, 64, 1408, **V3_ROUTER, vocab_size=163840, norm_epsilon=1e-5,
            max_position_embeddings=8192, rotary_base=5e4, moe_router_topk=6,
            moe_router_topk_scaling_factor=2.446,
        ),
        "deepseek-v3": _shape(
            61, 7168, 18432, 128, 256, 2048, **_V3, **_yarn(40.0, 1.0), vocab_size=129280,
            moe_layer_freq="[0]*3+[1]*58", moe_shared_expert_intermediate_size=2048,
            moe_router_num_groups=8, moe_router_group_topk=4, moe_router_topk_scaling_factor=2.5,
        ),
        "kimi-k2": _shape(
            61, 7168, 18432, 64, 384, 2048, **_V3, **_yarn(32.0, 1.0, yarn_beta_fast=1.0),
            vocab_size=163840, max_position_embeddings=131072, rotary_base=5e4,
            moe_shared_expert_intermediate_size=2048, moe_router_topk_scaling_factor=2.827,
        ),
    },
)  # fmt: skip

GLM4_MOE = DeepSeekExperts(
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    fields=frozenset({"rotary_percent"}),
    switches={"add_qkv_bias": "attention_bias", "qk_layernorm": "use_qk_norm"},
    presets={
        "glm-4.5-air": preset(
            46, 4096, 10944, 96, 8, **V3_ROUTER, kv_channels=128, vocab_size=151552, norm_epsilon=1e-5,
            max_position_embeddings=131072, rotary_base=1e6, rotary_percent=0.5, add_qkv_bias=True,
            untie_embeddings_and_output_weights=True, num_experts=128, moe_router_topk=8,
            moe_ffn_hidden_size=1408, moe_shared_expert_intermediate_size=1408,
            moe_layer_freq="[0]*1+[1]*45",
        ),
    },
)  # fmt: skip
"""DeepSeek's experts after attention of grouped heads, which may have biases and norms."""

ALL = (DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE)
