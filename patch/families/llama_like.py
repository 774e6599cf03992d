"""What LLaMA, Mistral and Qwen share: the weight table, and a config.json that differs in a few keys only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from patch.families.config_reader import ConfigReader
from patch.families.family import Family
from patch.families.rope import ROPE_FIELDS, read_rope, write_rope
from patch.families.shape import MOST_LAYERS, ModelShape, Window, traits_of
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT, Kind, WeightRow

_SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "pretraining_tp": 1,
    "partial_rotary_factor": 1.0,
}
"""Keys with their only supported value; all of them may be absent."""

_KEYS: dict[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
}
"""ModelConfig's field -> config.json's key, for fields with the same value in both."""


@dataclass(frozen=True, kw_only=True)
class LlamaLike(Family):
    """A family whose models differ from LLaMA only in their traits and in the keys that state them."""

    defaults: Mapping[str, Any]
    """Defaults of the family's configuration class in transformers, if they differ from LlamaConfig's."""
    slides: Callable[[ConfigReader], bool] | None
    """Whether the layers use the window given by `sliding_window`; None: they never have a window."""
    type_keys: Callable[[ModelShape], dict[str, Any]]
    """The keys for traits that only this family's config.json has."""

    @property
    def has_window(self) -> bool:
        """Whether the layers of its models may have a sliding window."""
        return self.slides is not None

    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """ModelConfig's fields from a config.json of this family; see Family."""
        config = config.with_defaults(self.defaults)
        config.accept_only(_SUPPORTED)
        if quantised := config.values.get("quantization_config"):
            expected = "none: the model that these quantised weights were made from, in bf16, fp16 or fp32"
            config.refuse("quantization_config", quantised, expected)
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        if heads < 1:
            config.refuse("num_attention_heads", heads, "at least 1")
        return {
            "num_layers": config.integer("num_hidden_layers", at_most=MOST_LAYERS),
            "hidden_size": hidden,
            "ffn_hidden_size": config.integer("intermediate_size"),
            "num_attention_heads": heads,
            "num_query_groups": config.integer("num_key_value_heads", heads),
            "kv_channels": config.integer("head_dim", hidden // heads),
            "vocab_size": config.integer("vocab_size"),
            "max_position_embeddings": config.integer("max_position_embeddings"),
            "norm_epsilon": config.number("rms_norm_eps", 1e-6),
            "untie_embeddings_and_output_weights": not config.boolean("tie_word_embeddings", False),
            "add_qkv_bias": self.traits.add_qkv_bias,
            "qk_layernorm": self.traits.qk_layernorm,
            "window_size": self._window(config),
            **read_rope(config),
        }

    def _window(self, config: ConfigReader) -> Window:
        """The window of all layers. Hugging Face's window length counts the token itself, ours does not."""
        window = config.values.get("sliding_window")
        if window is None or self.slides is None or not self.slides(config):
            return None
        if config.integer("sliding_window") < 1:
            config.refuse("sliding_window", window, "at least 1")
        return config.integer("sliding_window") - 1, 0

    def write_type(self, described: dict[str, Any], model: ModelShape) -> None:
        """Set the keys that state the family; see Family."""
        described |= {"architectures": [self.architecture], "model_type": self.model_type}
        described.pop("layer_types", None)  # transformers 5 derives it from the window
        described |= self.type_keys(model)

    def write_shape(self, described: dict[str, Any], model: ModelShape, fields: Set[str]) -> None:
        """Set the keys of these fields; see Family."""
        described |= {key: getattr(model, field) for field, key in _KEYS.items() if field in fields}
        if "untie_embeddings_and_output_weights" in fields:
            described["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
        if fields & ROPE_FIELDS or "rope_parameters" in described:
            write_rope(described, model)

    def weights(self, model: ModelShape) -> tuple[WeightRow, ...]:
        """The embedding, the layers' parameters, the last norm, the output layer; see Family."""
        table = (model.vocab_size, model.hidden_size)
        output = "lm_head" if model.untie_embeddings_and_output_weights else "model.embed_tokens"
        norm = {"model.norm.weight": (model.hidden_size,)}
        return (
            WeightRow(EMBEDDING_PARAMETER, Kind.VOCAB_PARALLEL, {"model.embed_tokens.weight": table}),
            *_layer_weights(model),
            WeightRow("decoder.final_layernorm.weight", Kind.REPLICATED, norm),
            WeightRow(TIED_OUTPUT, Kind.VOCAB_PARALLEL, {f"{output}.weight": table}),
        )


def window_length(model: ModelShape) -> int | None:
    """The value of config.json's `sliding_window`, which counts the token itself."""
    return None if model.window_size is None else model.window_size[0] + 1


def _layer_weights(model: ModelShape) -> list[WeightRow]:
    """The parameters of a layer in the order of its computation; those that traits add come last."""
    hidden, ffn, head, traits = model.hidden_size, model.ffn_hidden_size, model.kv_channels, traits_of(model)
    query, key = model.num_attention_heads * head, model.num_query_groups * head
    qkv = {"q": query, "k": key, "v": key}

    def row(name: str, kind: Kind, hf: Mapping[str, tuple[int, ...]]) -> WeightRow:
        named = {f"model.layers.*.{tensor}": shape for tensor, shape in hf.items()}
        return WeightRow(f"decoder.layers.*.{name}", kind, named)

    matrices = {f"self_attn.{name}_proj.weight": (count, hidden) for name, count in qkv.items()}
    output = {"self_attn.o_proj.weight": (hidden, query)}
    gate_up = {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
    rows = [
        row("input_layernorm.weight", Kind.REPLICATED, {"input_layernorm.weight": (hidden,)}),
        row("self_attention.linear_qkv.weight", Kind.QKV, matrices),
        row("self_attention.linear_proj.weight", Kind.ROW_PARALLEL, output),
        row("pre_mlp_layernorm.weight", Kind.REPLICATED, {"post_attention_layernorm.weight": (hidden,)}),
        row("mlp.linear_fc1.weight", Kind.GATED_MLP, gate_up),
        row("mlp.linear_fc2.weight", Kind.ROW_PARALLEL, {"mlp.down_proj.weight": (hidden, ffn)}),
    ]
    if traits.add_qkv_bias:
        biases = {f"self_attn.{name}_proj.bias": (count,) for name, count in qkv.items()}
        rows.append(row("self_attention.linear_qkv.bias", Kind.QKV, biases))
    if traits.qk_layernorm:
        for name in ("q", "k"):
            norm = {f"self_attn.{name}_norm.weight": (head,)}
            rows.append(row(f"self_attention.{name}_layernorm.weight", Kind.REPLICATED, norm))
    return rows
