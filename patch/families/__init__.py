"""The model families: what depends on a `model_type` of transformers, one file each; see README.md.

Imports neither torch nor megatron, nor the configuration, which reads config.json and presets through it.
"""

from __future__ import annotations

from typing import Any

from patch.families.config_reader import ConfigReader
from patch.families.family import Family
from patch.families.llama import LLAMA
from patch.families.mistral import MISTRAL
from patch.families.qwen2 import QWEN2
from patch.families.qwen3 import QWEN3
from patch.families.shape import TYPE_FIELDS, WEIGHT_FIELDS, ModelShape, Traits, traits_of
from patch.families.weights import Kind, WeightRow

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3)}
"""`model_type` -> family. Of several that compute the same model, the first is exported."""


def read_config(config: ConfigReader) -> dict[str, Any]:
    """ModelConfig's fields by a config.json of any family.

    Raises:
        ConfigError: its `model_type` is none of FAMILIES, or the model has what they do not support.
    """
    model_type = config.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        config.refuse("model_type", model_type, f"one of {', '.join(FAMILIES)}: no other is supported")
    return FAMILIES[model_type].read_config(config)


def family_of(model: ModelShape, model_type: str | None = None) -> Family | None:
    """The family whose class in transformers computes this model; None: transformers has none.

    Args:
        model_type: of the family to take where several do: LLaMA, and a Mistral without a window.
    """
    found = [family for family in FAMILIES.values() if family.computes(model)]
    named = (family for family in found if family.model_type == model_type)
    return next(named, found[0] if found else None)


def weight_rows(model: ModelShape) -> tuple[WeightRow, ...]:
    """The weight table of a model.

    A combination of traits that transformers has no class for can be trained, though not exported: biases on
    q, k, v beside norms of their heads. Its weights have LLaMA's names.
    """
    return (family_of(model) or LLAMA).weights(model)


__all__ = [
    "FAMILIES",
    "TYPE_FIELDS",
    "WEIGHT_FIELDS",
    "ConfigReader",
    "Family",
    "Kind",
    "ModelShape",
    "Traits",
    "WeightRow",
    "family_of",
    "read_config",
    "traits_of",
    "weight_rows",
]
