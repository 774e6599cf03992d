"""The model families: a model's shape, and all that depends on a `model_type` of transformers; see README.md.

Imports neither torch nor megatron.
"""

from __future__ import annotations

from typing import Any

from patch.families.config_json import ConfigReader
from patch.families.family import Family
from patch.families.llama import LLAMA
from patch.families.shape import (
    SHAPE_FIELDS,
    TYPE_FIELDS,
    WEIGHT_FIELDS,
    AttentionBackend,
    HfAttention,
    ModelConfig,
    Traits,
    TransformerImpl,
    traits_of,
)
from patch.families.sliding import MISTRAL, QWEN2, QWEN3
from patch.families.weights import Kind, WeightRow, weight_rows

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""`model_type` -> family. If several families compute the same model, it is exported as the first of them."""


def read_config(config: ConfigReader) -> dict[str, Any]:
    """ModelConfig's fields from a config.json of any family.

    Raises:
        ConfigError: its `model_type` is none of FAMILIES, or the model has something they do not support.
    """
    model_type = config.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        config.refuse("model_type", model_type, f"one of {', '.join(FAMILIES)}: no other is supported")
    return FAMILIES[model_type].read_config(config)


def family_of(model: ModelConfig, model_type: str | None = None) -> Family | None:
    """The family whose class in transformers computes this model; None if transformers has no such class.

    Args:
        model: the model.
        model_type: the preferred family if several compute the model: LLaMA, and Mistral without a window.
    """
    matching = [family for family in FAMILIES.values() if family.computes(model)]
    preferred = (family for family in matching if family.model_type == model_type)
    return next(preferred, matching[0] if matching else None)


PRESETS: dict[str, dict[str, Any]] = {
    size: dict(fields) for family in FAMILIES.values() for size, fields in family.presets.items()
}
"""MODEL_SIZE -> ModelConfig's fields; a field that a preset leaves out keeps its default."""
MODEL_SIZES: tuple[str, ...] = (*PRESETS, "auto")
__all__ = [
    "FAMILIES",
    "MODEL_SIZES",
    "PRESETS",
    "SHAPE_FIELDS",
    "TYPE_FIELDS",
    "WEIGHT_FIELDS",
    "AttentionBackend",
    "ConfigReader",
    "Family",
    "HfAttention",
    "Kind",
    "ModelConfig",
    "Traits",
    "TransformerImpl",
    "WeightRow",
    "family_of",
    "read_config",
    "traits_of",
    "weight_rows",
]
