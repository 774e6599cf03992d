"""Qwen 2 and 2.5, dense models: LLaMA's layers with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from patch.families.config_reader import ConfigReader
from patch.families.llama_like import LlamaLike, window_length
from patch.families.shape import ModelShape, Traits


def slides(config: ConfigReader) -> bool:
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


def window_keys(model: ModelShape) -> dict[str, Any]:
    """The keys of the window; the layers from number `max_window_layers` on have it."""
    window = window_length(model)
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 0 if window else 28,
    }


QWEN2 = LlamaLike(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    traits=Traits(add_qkv_bias=True),
    defaults={"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    slides=slides,
    type_keys=window_keys,
)
