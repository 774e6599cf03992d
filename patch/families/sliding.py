"""Mistral, Qwen 2, 2.5 and 3, dense models: LLaMA's layers, which may have a sliding window."""

from __future__ import annotations

from typing import Any

from patch.families.config_json import ConfigReader
from patch.families.family import Family
from patch.families.shape import ModelConfig, Traits


def _window_length(model: ModelConfig) -> int | None:
    """The value of config.json's `sliding_window`, which counts the token itself."""
    return None if model.window_size is None else model.window_size[0] + 1


def _slides(config: ConfigReader) -> bool:
    """Whether the layers have a sliding window; without `use_sliding_window` none has.

    Raises:
        ConfigError: some layers have a window and others do not.
    """
    if not config.boolean("use_sliding_window", False):
        return False
    key, kinds = "layer_types", config.values.get("layer_types")
    if not kinds:
        key, num_full = "max_window_layers", config.integer("max_window_layers", 28)
        has_both = 0 < num_full < config.integer("num_hidden_layers")
        kinds = (
            ["full", "sliding_attention"] if has_both else ["full" if num_full > 0 else "sliding_attention"]
        )
    elif not isinstance(kinds, list):
        config.refuse(key, kinds, "a list of the layers' attention")
    if any(kind != kinds[0] for kind in kinds):
        config.refuse(key, config.values.get(key), "the same attention in all layers")
    return kinds[0] == "sliding_attention"


def _window_keys(model: ModelConfig) -> dict[str, Any]:
    """The keys of the window; the layers from number `max_window_layers` on have it."""
    window = _window_length(model)
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0 if window else 28,
    }


MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    traits=Traits(),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    slides=lambda config: True,
    type_keys=lambda model: {"sliding_window": _window_length(model)},
)
"""In version 0.1 all layers have the window."""

QWEN2 = Family(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    traits=Traits(add_qkv_bias=True),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    slides=_slides,
    type_keys=_window_keys,
)
"""Biases on queries, keys and values."""

QWEN3 = Family(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    traits=Traits(qk_layernorm=True),
    defaults={**QWEN2.defaults, "head_dim": 128},
    slides=_slides,
    type_keys=_window_keys,
)
"""An RMSNorm of each query and key head; the other keys of config.json are those of Qwen 2."""
