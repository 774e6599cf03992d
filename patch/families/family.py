"""A family: everything that depends on a `model_type` of transformers, in both directions of config.json.

The layers of LLaMA, Mistral and Qwen differ in a few traits and a few keys of config.json.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from patch.families.config_json import ROPE_FIELDS, ConfigReader, read_rope, set_keys, write_rope
from patch.families.shape import MOST_LAYERS, TRAIT_FIELDS, ModelConfig, Traits, Window
from patch.families.weights import WeightRow, dense_rows

_SIZES: dict[str, str] = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "max_position_embeddings": "max_position_embeddings",
}
_KEYS = {**_SIZES, "norm_epsilon": "rms_norm_eps"}
"""ModelConfig's field -> config.json's key of the same value; `_SIZES` are whole numbers."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: its traits, its keys of config.json, its public sizes."""

    model_type: str
    architecture: str
    """Class in transformers, as in config.json's `architectures`."""
    traits: Traits
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """MODEL_SIZE -> ModelConfig's fields. Fields that a size leaves out keep their defaults."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a config.json may lack: the defaults of the class in transformers."""
    slides: Callable[[ConfigReader], bool] | None = None
    """Whether layers use `sliding_window` if no `layer_types` say it, or None if they never do."""
    type_keys: Callable[[ModelConfig], dict[str, Any]] = lambda model: {}
    """Keys for traits that only this family's config.json has."""
    own_of_router: Set[str] = frozenset()
    """Router traits of the class in transformers: float32 "logits", float32 "weights" in a 16-bit model,
    "unsorted" choices."""
    flags: Set[str] = frozenset()
    """TRAIT_FIELDS in which models of the family differ."""
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
        config.accept_only({"hidden_act": self.traits.activation})
        hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
        if heads < 1:
            config.refuse("num_attention_heads", heads, "at least 1")
        config.integer("num_hidden_layers", at_most=MOST_LAYERS)
        derived = {"num_query_groups": heads, "kv_channels": hidden // heads}
        return {
            "model_type": self.model_type,
            **{name: config.integer(key, derived.get(name)) for name, key in _SIZES.items()},
            "norm_epsilon": config.number("rms_norm_eps", 1e-6),
            "untie_embeddings_and_output_weights": not config.boolean("tie_word_embeddings", False),
            **{name: getattr(self.traits, name) for name in TRAIT_FIELDS},
            "window_size": self._window(config),
            **read_rope(config),
        }

    def computes(self, model: ModelConfig) -> bool:
        """Return whether the class in transformers, given its traits, has these widths and experts."""
        return model.num_experts is None and not model.is_latent

    def _window(self, config: ConfigReader) -> Window:
        """Window of all layers. Hugging Face's window length counts the token itself, ours does not."""
        window, kinds = config.values.get("sliding_window"), config.values.get("layer_types")
        has_window = window is not None and config.boolean("use_sliding_window", True)
        slides = self.slides if has_window else None
        if kinds is not None:
            legal = ["full_attention", "sliding_attention"][: 2 if slides else 1]
            number = config.integer("num_hidden_layers")
            if kinds not in [[kind] * number for kind in legal]:
                config.refuse("layer_types", kinds, f"{' or '.join(legal)} for all {number} layers")
        if slides is None or not (kinds[0] == "sliding_attention" if kinds else slides(config)):
            return None
        if config.integer("sliding_window") < 1:
            config.refuse("sliding_window", window, "at least 1")
        return config.integer("sliding_window") - 1, 0

    def write_type(self, described: dict[str, Any], model: ModelConfig) -> None:
        """Set the keys of config.json that state family and traits; `described` is changed in place."""
        described |= {"architectures": [self.architecture], "model_type": self.model_type}
        described.pop("layer_types", None)  # transformers 5 derives it from the window
        described |= {**self.type_keys(model), "hidden_act": self.traits.activation}

    def write_shape(self, described: dict[str, Any], model: ModelConfig, fields: Set[str]) -> None:
        """Set the keys of config.json for some `fields` of the model, without the keys of `write_type`."""
        changed = {key: getattr(model, field) for field, key in _KEYS.items() if field in fields}
        set_keys(described, self.model_type, changed)
        if "untie_embeddings_and_output_weights" in fields:
            described["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
        if fields & ROPE_FIELDS or "rope_parameters" in described:
            write_rope(described, model)
