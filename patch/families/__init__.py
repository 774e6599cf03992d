"""The model families: all that depends on a `model_type` of transformers, one file each; see README.md.

Imports neither torch nor megatron nor `patch.config`, which reads config.json and presets with this package.
"""

from __future__ import annotations

from typing import Any

from patch.families.config_reader import ConfigReader
from patch.families.family import Family
from patch.families.llama import LLAMA
from patch.families.mistral import MISTRAL
from patch.families.qwen2 import QWEN2
from patch.families.qwen3 import QWEN3
from patch.families.shape import MOST_LAYERS, TYPE_FIELDS, WEIGHT_FIELDS, ModelShape, Traits, traits_of
from patch.families.weights import Kind, WeightRow

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


def family_of(model: ModelShape, model_type: str | None = None) -> Family | None:
    """The family whose class in transformers computes this model; None if transformers has no such class.

    Args:
        model: the model.
        model_type: the preferred family if several compute the model: LLaMA, and Mistral without a window.
    """
    matching = [family for family in FAMILIES.values() if family.computes(model)]
    preferred = (family for family in matching if family.model_type == model_type)
    return next(preferred, matching[0] if matching else None)


def weight_rows(model: ModelShape) -> tuple[WeightRow, ...]:
    """The weight table of a model.

    A combination of traits for which transformers has no class (biases on q, k, v together with norms of
    their heads) can be trained but not exported. Its weights have LLaMA's names.
    """
    return (family_of(model) or LLAMA).weights(model)


__all__ = [
    "FAMILIES",
    "MOST_LAYERS",
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
