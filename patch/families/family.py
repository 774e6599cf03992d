"""A family: everything that depends on a `model_type` of transformers, in both directions of config.json.

The layers of LLaMA, Mistral and Qwen differ in a few traits and a few keys of config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from patch.families.config_json import (
    FULL,
    ROPE_FIELDS,
    SLIDING,
    ConfigReader,
    read_rope,
    set_keys,
    write_rope,
)
from patch.families.layers import layers_with_window, skipped_text
from patch.families.shape import LATENT_SIZES, MOST_LAYERS, OWN_FIELDS, TRAIT_FIELDS, ModelConfig, Traits
from patch.families.weights import WeightRow, dense_rows

_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}

ATTENTION_BIAS = {"add_proj_bias": "attention_bias"}
"""For `Family.switches`: the key is also that of biases of queries, keys and values."""
BIASES = {**ATTENTION_BIAS, "add_mlp_bias": "mlp_bias"}


def window_length(model: ModelConfig) -> int | None:
    """Return the value of config.json's `sliding_window`, which counts the token itself."""
    return None if model.window_size is None else model.window_size[0] + 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: its traits, its keys of config.json, its public sizes."""

    model_type: str
    architecture: str
    """Class in transformers, as in config.json's `architectures`."""
    traits: Traits = Traits()
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """MODEL_SIZE -> ModelConfig's fields. Fields that a size leaves out keep their defaults."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config.json may lack: the defaults of the class in transformers."""
    slides_from: int | None = None
    """First layer with `sliding_window` if config.json does not say it, or None if no layer has one."""
    type_keys: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    """Keys for traits that only this family's config.json has."""
    fields: Set[str] = frozenset()
    """Traits that are flags, and OWN_FIELDS, in which its models differ, beside the next two tables."""
    numbers: Mapping[str, str] = field(default_factory=dict)
    """One of OWN_FIELDS -> config.json's key of the same number; null is None."""
    shape_keys: Mapping[str, str] = field(default_factory=lambda: {**_SIZES, "norm_epsilon": "rms_norm_eps"})
    """Field of the parts that all families have -> config.json's key of the same value, as it is written."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Field of further parts of its layers -> config.json's key of the same whole number."""
    switches: Mapping[str, str] = field(default_factory=dict)
    """Field -> config.json's key of the same boolean."""
    full_every: int | None = None
    """Every Nth layer has no window if no `layer_types` say it, or None if all layers are alike."""
    activation_key: str = "hidden_act"
    scales_embedding: bool = False
    """Whether the embedding of the class in transformers multiplies by `embedding_multiplier` itself."""
    local_base_key: str | None = None
    """Key of transformers 4 for `rotary_base_local`."""
    own_of_router: Set[str] = frozenset()
    """Router traits of the class in transformers: float32 "logits", float32 "weights" in a 16-bit model,
    "unsorted" choices."""
    has_polar_rope: bool = False
    """Whether the class in transformers rotates heads as complex float32 numbers."""
    rows: Callable[[ModelConfig, Traits], tuple[WeightRow, ...]] = dense_rows
    """Weight table of a model with these traits."""

    def read_config(self, config: ConfigReader) -> dict[str, Any]:
        """Return ModelConfig's fields from a config.json of this family.

        Raises:
            ConfigError: a feature is not supported; the message names the key.
        """
        config = config.with_defaults(self.defaults)
        config.accept_only({self.activation_key: self.traits.activation})
        hidden = config.integer("hidden_size")
        heads = config.integer("num_attention_heads", at_least=1)
        config.integer("num_hidden_layers", at_most=MOST_LAYERS)
        switches = {name: config.boolean(key, False) for name, key in self.switches.items()}
        has_qkv_bias = self.traits.add_qkv_bias or switches.get("add_proj_bias", False)
        derived = {"num_query_groups": heads, "kv_channels": hidden // heads}
        sizes = {**_SIZES, **self.sizes}
        return {
            "model_type": self.model_type,
            **{name: config.integer(key, derived.get(name)) for name, key in sizes.items()},
            "norm_epsilon": config.number("rms_norm_eps", 1e-6),
            "untie_embeddings_and_output_weights": not config.boolean("tie_word_embeddings", False),
            **{name: getattr(self.traits, name) for name in TRAIT_FIELDS},
            "add_qkv_bias": has_qkv_bias,
            **switches,
            **self._window(config),
            **read_rope(config, self.own_fields),
            **{
                name: None if config.values.get(key) is None else config.number(key)
                for name, key in self.numbers.items()
            },
        }

    @property
    def own_fields(self) -> Set[str]:
        """The OWN_FIELDS that the class in transformers has."""
        return OWN_FIELDS.keys() & {*self.fields, *self.numbers, *self.switches}

    @property
    def flags(self) -> Set[str]:
        """The traits, which flags set, in which its models differ."""
        return {*self.fields, *self.switches} - OWN_FIELDS.keys()

    def computes(self, model: ModelConfig) -> bool:
        """Return whether the class in transformers, given its traits, has these parts and widths."""
        has_experts, is_latent = "num_experts" in self.sizes, not self.sizes.keys().isdisjoint(LATENT_SIZES)
        return (bool(model.num_experts), model.is_latent) == (has_experts, is_latent)

    def _window(self, config: ConfigReader) -> dict[str, Any]:
        """Fields of the window. Hugging Face's window length counts the token itself, ours does not."""
        number, kinds = config.integer("num_hidden_layers"), config.values.get("layer_types")
        is_there = self.slides_from is not None and config.values.get("sliding_window") is not None
        slides = is_there and config.boolean("use_sliding_window", True)
        legal = [[FULL] * number, *([[SLIDING] * number] if slides else ())]
        if slides and self.full_every is not None:
            every = config.integer("sliding_window_pattern", self.full_every)
            kinds = kinds or [SLIDING if (n + 1) % every else FULL for n in range(number)]
            if len(kinds) != number or not {*kinds} <= {FULL, SLIDING}:
                config.refuse("layer_types", kinds, f"{FULL} or {SLIDING} for each of {number} layers")
        elif kinds is None:
            first = config.integer("max_window_layers", self.slides_from) if slides else number
            if 0 < first < number:
                config.refuse("max_window_layers", first, "the same attention in all layers")
            kinds = legal[int(slides and first <= 0)]
        elif kinds not in legal:
            words = " or ".join(each[0] for each in legal)
            config.refuse("layer_types", kinds, f"{words} for all {number} layers")
        with_window = [n for n, kind in enumerate(kinds) if kind == SLIDING]
        if not with_window:
            return {"window_size": None}
        window = config.integer("sliding_window", at_least=1)
        without = [n for n in range(number) if n not in with_window]
        skipped = skipped_text(without, with_window, number)
        fields = {"window_size": (window - 1, 0)}
        return fields if self.full_every is None else {**fields, "window_attn_skip_freq": skipped}

    def write_type(self, described: dict[str, Any], model: ModelConfig) -> None:
        """Set the keys of config.json that state family and traits; `described` is changed in place."""
        described |= {"architectures": [self.architecture], "model_type": self.model_type}
        described.pop("layer_types", None)  # transformers 5 derives it from the window
        described |= {**self.type_keys(model), self.activation_key: self.traits.activation}
        described |= {key: getattr(model, name) for name, key in self.switches.items()}
        if {"rotary_base_local", "llama_4_scaling_beta"} & self.own_fields:  # no keys of transformers 4
            described["rope_parameters"] = {}
        if self.slides_from is not None:
            described["sliding_window"] = window_length(model)
        if self.full_every is not None:
            slides = layers_with_window(model)
            kinds = [SLIDING if n in slides else FULL for n in range(model.num_layers)]
            described["layer_types"] = kinds

    def write_shape(self, described: dict[str, Any], model: ModelConfig, fields: Set[str]) -> None:
        """Set the keys of config.json for some `fields` of the model, without the keys of `write_type`."""
        keys = {**self.shape_keys, **self.numbers, **self.sizes}
        changed = {key: getattr(model, field) for field, key in keys.items() if field in fields}
        set_keys(described, self.model_type, changed)
        if "untie_embeddings_and_output_weights" in fields:
            described["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
        if self.traits.has_rope and (fields & ROPE_FIELDS or "rope_parameters" in described):
            write_rope(described, model, self.own_fields, self.local_base_key)
