"""BLOOM: ALiBi, LayerNorms (one after the embedding), biases everywhere, an MLP without a gate.

Its weights have their own names. The merged query_key_value has the rows of each head's query, key and value
in turn, which is megatron-core's order. Sources of the sizes: the config.json that BigScience publishes with
each model. The tokenizer has 250,680 words; the embedding is padded to 250,880 rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from patch.families.config_json import ConfigReader
from patch.families.family import Family
from patch.families.shape import ALIBI_POSITIONS, UNUSED_ROTARY_BASE, ModelConfig, Traits, preset
from patch.families.weights import rows_named


class _Bloom(Family):
    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """The MLP has four times the hidden width; keys of other names are passed on as Family's keys."""
        of_llama = {
            "num_hidden_layers": config.values["n_layer"],
            "num_attention_heads": config.values["n_head"],
            "intermediate_size": 4 * config.integer("hidden_size"),
            "rms_norm_eps": config.number("layer_norm_epsilon"),
            "max_position_embeddings": ALIBI_POSITIONS,
            "tie_word_embeddings": config.boolean("tie_word_embeddings", True),
        }
        return super().read_config(ConfigReader(config.file, {**config.values, **of_llama}))

    def write_type(self, described: dict[str, Any], model: ModelConfig) -> None:
        """BLOOM's class has one activation, which no key names."""
        super().write_type(described, model)
        described.pop("hidden_act")

    def computes(self, model: ModelConfig) -> bool:
        """BLOOM's class has no grouped heads; its only widths are hidden and 4 x hidden."""
        hidden, heads = model.hidden_size, model.num_attention_heads
        has_its_widths = model.ffn_hidden_size == 4 * hidden and model.kv_channels * heads == hidden
        return super().computes(model) and has_its_widths and model.num_query_groups == heads


_NAMES = {
    "model.layers.*.self_attn.o_proj.": "transformer.h.*.self_attention.dense.",
    "model.layers.*.self_attn.": "transformer.h.*.self_attention.",
    "model.layers.*.mlp.up_proj.": "transformer.h.*.mlp.dense_h_to_4h.",
    "model.layers.*.mlp.down_proj.": "transformer.h.*.mlp.dense_4h_to_h.",
    "model.layers.": "transformer.h.",
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.embed_norm.": "transformer.word_embeddings_layernorm.",
    "model.norm.": "transformer.ln_f.",
}


def _preset(num_layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return preset(
        num_layers, hidden, 4 * hidden, heads, vocab_size=250_880, norm_epsilon=1e-5,
        max_position_embeddings=ALIBI_POSITIONS, rotary_base=UNUSED_ROTARY_BASE,
    )  # fmt: skip


BLOOM = _Bloom(
    model_type="bloom",
    architecture="BloomForCausalLM",
    traits=Traits(
        normalization="LayerNorm",
        activation="gelu_pytorch_tanh",
        gated_linear_unit=False,
        add_bias_linear=True,
        position_embedding_type="alibi",
        embedding_norm=True,
    ),
    shape_keys={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "n_layer",
        "num_attention_heads": "n_head",
        "norm_epsilon": "layer_norm_epsilon",
    },
    rows=partial(rows_named, _NAMES, joined={"query_key_value": "q_proj"}, is_grouped=True),
    presets={
        "bloom-560m": _preset(24, 1024, 16),
        "bloom-1b1": _preset(24, 1536, 16),
        "bloom-1b7": _preset(24, 2048, 16),
        "bloom-3b": _preset(30, 2560, 32),
        "bloom-7b1": _preset(30, 4096, 32),
        "bloom-176b": _preset(70, 14336, 112),
    },
)  # fmt: skip

ALL = (BLOOM,)
