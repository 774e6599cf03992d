"""Dense families with parts that LLaMA lacks: norms behind, windows and RoPE by layer, factors, caps.

Their numbers are read from config.json. Sources: each family's class in transformers.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from patch.families.config_json import ConfigReader
from patch.families.family import ATTENTION_BIAS, BIASES, Family
from patch.families.layers import layers_with_rope, skipped_text
from patch.families.shape import UNUSED_ROTARY_BASE, ModelConfig, Traits
from patch.families.weights import rows_named


class _SmolLM3(Family):
    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """Every Nth layer has no RoPE, or those with 0 in `no_rope_layers`."""
        fields, marks = super().read_config(config), config.values.get("no_rope_layers")
        number = fields["num_layers"]
        step = config.integer("no_rope_layer_interval", 4, at_least=1 if marks is None else None)
        if marks is None:
            marks = [int((n + 1) % step != 0) for n in range(number)]
        if not isinstance(marks, list) or len(marks) != number or not {*marks} <= {0, 1}:
            config.refuse("no_rope_layers", marks, f"0 or 1 for each of {number} layers")
        without = [n for n, mark in enumerate(marks) if not mark]
        return {**fields, "no_rope_freq": skipped_text(without, without, number)}


def _rope_marks(model: ModelConfig) -> dict[str, Any]:
    with_rope = layers_with_rope(model)
    return {"no_rope_layers": [int(n in with_rope) for n in range(model.num_layers)]}


SMOLLM3 = _SmolLM3(
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    fields=frozenset({"no_rope_freq"}),
    switches=BIASES,
    type_keys=_rope_marks,
)

OLMO2 = Family(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    traits=Traits(norm_placement="behind", qk_layernorm=True, qk_norm_of="all heads"),
    switches=ATTENTION_BIAS,
)

OLMO3 = Family(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    traits=OLMO2.traits,
    slides_from=0,
    full_every=4,
    fields=frozenset({"window_attn_skip_freq", "rotary_base_local"}),
    switches=ATTENTION_BIAS,
)
"""Layers with the window have RoPE without scaling."""

_FACTORS = {
    "embedding_multiplier": "embedding_multiplier",
    "residual_multiplier": "residual_multiplier",
    "logits_scaling": "logits_scaling",
    "softmax_scale": "attention_multiplier",
}

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    numbers=_FACTORS,
    switches=BIASES,
)

MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    slides_from=0,
    fields=frozenset({"llama_4_scaling_beta"}),
)


_GLM4_NAMES = {
    ".pre_feedforward_layernorm": ".post_attention_layernorm",
    ".post_attention_layernorm": ".post_self_attn_layernorm",
    ".post_feedforward_layernorm": ".post_mlp_layernorm",
}
GLM4 = Family(
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    traits=Traits(norm_placement="both", rotary_interleaved=True),
    fields=frozenset({"rotary_percent"}),
    switches={"add_qkv_bias": "attention_bias"},
    defaults={"partial_rotary_factor": 0.5},
    rows=partial(rows_named, _GLM4_NAMES, joined={"gate_up_proj": "gate_proj"}),
)

PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    slides_from=0,
    fields=frozenset({"rotary_percent"}),
    rows=partial(rows_named, {}, joined={"qkv_proj": "q_proj", "gate_up_proj": "gate_proj"}),
)
"""Phi-3 and Phi-4 up to 4 Ki and 16 Ki tokens; LongRoPE is refused."""

_CAP = {"final_logit_softcapping": "final_logit_softcapping"}


@dataclass(frozen=True, kw_only=True)
class _Gemma(Family):
    activation_key: str = "hidden_activation"
    scales_embedding: bool = True

    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """Embeddings get the root of the width; scores the inverse root of `query_pre_attn_scalar`."""
        fields, scalar = super().read_config(config), config.number("query_pre_attn_scalar")
        if scalar <= 0:
            config.refuse("query_pre_attn_scalar", scalar, "more than 0")
        of_embedding = fields["hidden_size"] ** 0.5
        return {**fields, "embedding_multiplier": of_embedding, "softmax_scale": scalar**-0.5}

    def computes(self, model: ModelConfig) -> bool:
        """The class has one factor of embeddings."""
        return super().computes(model) and model.embedding_multiplier == model.hidden_size**0.5

    def write_shape(self, described: dict[str, Any], model: ModelConfig, fields: Set[str]) -> None:
        super().write_shape(described, model, fields)
        if "softmax_scale" in fields:
            scalar = round((model.softmax_scale or model.kv_channels**-0.5) ** -2, 6)
            described["query_pre_attn_scalar"] = int(scalar) if scalar % 1 == 0 else scalar


_OF_GEMMA = frozenset({"window_attn_skip_freq", "softmax_scale", "embedding_multiplier"})
_GEMMA_TRAITS = Traits(
    activation="gelu_pytorch_tanh", norm_placement="both", layernorm_zero_centered_gamma=True
)
GEMMA2 = _Gemma(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    traits=_GEMMA_TRAITS,
    slides_from=0,
    full_every=2,
    fields=_OF_GEMMA,
    switches=ATTENTION_BIAS,
    numbers=_CAP | {"attn_logit_softcapping": "attn_logit_softcapping"},
)

GEMMA3 = _Gemma(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    traits=replace(_GEMMA_TRAITS, qk_layernorm=True),
    slides_from=0,
    full_every=6,
    fields=_OF_GEMMA | {"rotary_base_local"},
    switches=ATTENTION_BIAS,
    numbers=_CAP,
    local_base_key="rope_local_base_freq",
)
"""The text models; layers with the window have their own RoPE base."""

_INTERNLM2_NAMES = {
    "model.embed_tokens.": "model.tok_embeddings.",
    "lm_head.": "output.",
    ".self_attn.o_proj.": ".attention.wo.",
    ".self_attn.": ".attention.",
    ".mlp.gate_proj.": ".feed_forward.w1.",
    ".mlp.up_proj.": ".feed_forward.w3.",
    ".mlp.down_proj.": ".feed_forward.w2.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".ffn_norm.",
}

INTERNLM2 = Family(
    model_type="internlm2",
    architecture="InternLM2ForCausalLM",
    type_keys=lambda model: {"bias": False},
    rows=partial(rows_named, _INTERNLM2_NAMES, joined={"wqkv": "q_proj"}, is_grouped=True),
)
"""InternLM 2 and 2.5. transformers has no such class: its folders have code, which is not run here."""

_BAICHUAN2_WORDS = 125696
"""Words of Baichuan 2, the only mark in config.json of its output layer, which normalizes its weight."""


class _Baichuan(Family):
    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """Only models with RoPE have `max_position_embeddings`; the others have ALiBi."""
        has_rope = "max_position_embeddings" in config.values
        longest = config.integer("max_position_embeddings" if has_rope else "model_max_length", 4096)
        values = {**config.values, "max_position_embeddings": longest}
        fields = super().read_config(ConfigReader(config.file, values))
        fields["normalize_output_weight"] = fields["vocab_size"] >= _BAICHUAN2_WORDS
        alibi = {"position_embedding_type": "alibi", "rotary_base": UNUSED_ROTARY_BASE}
        return fields if has_rope else {**fields, **alibi}

    def computes(self, model: ModelConfig) -> bool:
        """LLaMA with ALiBi, by a flag, has the same layers; its weights keep LLaMA's names."""
        has_alibi, has_norm = model.position_embedding_type == "alibi", model.normalize_output_weight
        is_own = has_norm == (model.vocab_size >= _BAICHUAN2_WORDS)
        return super().computes(model) and is_own and (not has_alibi or model.model_type == self.model_type)

    def write_shape(self, described: dict[str, Any], model: ModelConfig, fields: Set[str]) -> None:
        super().write_shape(described, model, fields)
        if model.position_embedding_type == "alibi":
            for key in ("max_position_embeddings", "rope_theta", "rope_scaling"):
                described.pop(key, None)
            described["model_max_length"] = model.max_position_embeddings


BAICHUAN = _Baichuan(
    model_type="baichuan",
    architecture="BaichuanForCausalLM",
    fields=frozenset({"position_embedding_type", "normalize_output_weight"}),
    rows=partial(rows_named, {}, joined={"W_pack": "q_proj"}),
)
"""Baichuan 1 and 2, with code in its folders as InternLM 2; 13B has ALiBi."""

ALL = (SMOLLM3, GRANITE, MINISTRAL3, PHI3, OLMO2, OLMO3, GLM4, GEMMA2, GEMMA3, INTERNLM2, BAICHUAN)
