"""The architecture of a model, and all that depends on a `model_type` of transformers; see README.md.

Here are the families by `model_type`, and what a model's own family decides: its traits, its weights, its
class in transformers. Imports neither torch nor megatron.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from patch.errors import ConfigError, shown
from patch.families.bloom import BLOOM
from patch.families.config_json import ConfigReader
from patch.families.deepseek import DEEPSEEK_V2
from patch.families.dense import LLAMA, MISTRAL, QWEN2, QWEN3
from patch.families.experts import MIXTRAL, QWEN2_MOE, QWEN3_MOE, ExpertsFamily, StackedPart, stacked_part
from patch.families.family import Family
from patch.families.layers import EVERY_LAYER, expert_layers
from patch.families.shape import (
    ALIBI_POSITIONS,
    EXPERT_FIELDS,
    LATENT_FIELDS,
    SHAPE_FIELDS,
    TRAIT_FIELDS,
    UNUSED_ROTARY_BASE,
    AttentionBackend,
    HfAttention,
    ModelConfig,
    Traits,
    TransformerImpl,
)
from patch.families.weights import MLP_PARTS, Kind, Part, WeightRow

FAMILIES: dict[str, Family] = {}
"""`model_type` -> family. A shape that names none belongs to the first that computes it."""
PRESETS: dict[str, dict[str, Any]] = {}
"""MODEL_SIZE -> ModelConfig's fields; a field that a preset leaves out keeps its default."""


_NOT_BUILT = {
    "deepseek_v3": "its groups of experts, its router's bias and its weights in 8 bits are not built",
    "gpt_oss": "experts with biases, attention with sinks and weights in MXFP4 are not built",
    "qwen3_next": "linear attention is not built",
}
"""Families with experts that are named by their reason."""


def register_family(family: Family) -> None:
    """Make a family known to all of this process that reads, plans, builds or converts models.

    It replaces one of its name. A program does this before it reads a command line, in each of its processes.
    """
    FAMILIES[family.model_type] = family
    for size, fields in family.presets.items():
        PRESETS[size] = {"model_type": family.model_type, **fields}
    layer_matrices.cache_clear()
    widths.cache_clear()


def read_config(config: ConfigReader) -> dict[str, Any]:
    """ModelConfig's fields from a config.json of any family.

    Raises:
        ConfigError: its `model_type` is none of FAMILIES, or the model has something they do not support.
    """
    model_type = config.values.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        why = _NOT_BUILT.get(str(model_type), "no other is supported")
        config.refuse("model_type", model_type, f"one of {', '.join(FAMILIES)}: {why}")
    return FAMILIES[model_type].read_config(config.by_table(model_type))


def family_called(model_type: str | None) -> Family:
    """The family of this name; LLaMA's for None.

    Raises:
        ConfigError: there is none.
    """
    if model_type is None:
        return LLAMA
    if model_type not in FAMILIES:
        expected = f"auto or one of {', '.join(FAMILIES)}"
        raise ConfigError(f"got {shown(model_type)}, expected {expected}", field="model_type")
    return FAMILIES[model_type]


def traits_of(model: ModelConfig) -> Traits:
    """The traits of a model: those of its family, overlaid with the fields that are flags."""
    flags = {name: getattr(model, name) for name in TRAIT_FIELDS}
    return dataclasses.replace(family_called(model.model_type).traits, **flags)


def own_traits(model_type: str | None) -> dict[str, Any]:
    """The traits that a family alone decides, no flag; LLaMA and Mistral have the same."""
    traits = dataclasses.asdict(family_called(model_type).traits)
    return {name: value for name, value in traits.items() if name not in TRAIT_FIELDS}


def family_of(model: ModelConfig, model_type: str | None = None) -> Family | None:
    """The family whose class in transformers computes this model; None if transformers has no such class.

    Args:
        model: the model; its own family computes it, unless flags have changed its traits, its window or its
            experts.
        model_type: the preferred family if several compute the model: LLaMA, and Mistral without a window.
    """
    traits, slides = traits_of(model), model.window_size is not None
    matching = {
        name: family
        for name, family in FAMILIES.items()
        if family.traits == traits and (family.slides is not None or not slides) and family.computes(model)
    }
    names = (model_type, model.model_type, *matching)
    return next((matching[name] for name in names if name is not None and name in matching), None)


def no_class(model: ModelConfig) -> tuple[str, str]:
    """Why no class of transformers computes a model (`family_of` is None), and what to change."""
    if model.num_experts or model.kv_lora_rank:
        names = ", ".join(name for name, family in FAMILIES.items() if isinstance(family, ExpertsFamily))
        return (
            "no model of transformers has such experts between such attention",
            f"experts and traits of one of {names}",
        )
    family = family_called(model.model_type)
    if not family.computes(model):
        return (
            f"{family.architecture} of transformers has no others",
            "as many key/value groups as heads, and the widths of its sizes",
        )
    return (
        "no model of transformers has biases on q, k, v and norms of their heads",
        "one of --add-qkv-bias and --qk-layernorm left out",
    )


def with_family(model: ModelConfig) -> ModelConfig:
    """The model with the family stored that computes it; its own, or LLaMA, where none does.

    Raises:
        ConfigError: its `model_type` is none of FAMILIES.
    """
    family = family_of(model) or family_called(model.model_type)
    return dataclasses.replace(model, model_type=family.model_type)


def weight_rows(model: ModelConfig) -> tuple[WeightRow, ...]:
    """Every parameter of a model, in the order in which Hugging Face stores them.

    A combination of traits for which transformers has no class has them too: it can be trained but not
    exported.
    """
    return family_called(model.model_type).rows(model, traits_of(model))


def differences(model: ModelConfig, theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Fields in which other values mean another model: the field, its other value, has it other weights."""
    for field in (each.name for each in dataclasses.fields(model) if each.name in theirs):
        value = theirs[field]
        meaning = own_traits if field == "model_type" else lambda value: value
        if meaning(value) != meaning(getattr(model, field)):
            is_cut_otherwise = field in ("num_layers", "make_vocab_size_divisible_by")
            other = weight_rows(dataclasses.replace(model, **{field: value}))
            yield field, value, is_cut_otherwise or other != weight_rows(model)


@lru_cache(maxsize=64)  # a search of layouts asks for the same ones many times
def layer_matrices(model: ModelConfig) -> tuple[WeightRow, ...]:
    """The weight matrices of the last layer, which has experts if any has; in the order of its products."""
    last = model.num_layers - 1
    return tuple(
        row for row in weight_rows(model) if row.is_per_layer and row.is_matrix and last in row.layers
    )


class Widths(NamedTuple):
    """Values of one token on a TP rank, of one part of a layer, as far as they are in use."""

    given: float
    """Output channels of the column-parallel products: q, k and v; gate and up."""
    taken: float
    """Input channels of the row-parallel products: attention's result; the MLP's."""


@lru_cache(maxsize=256)
def widths(model: ModelConfig, part: Part, tp_size: int) -> Widths:
    """The widths of attention or MLP on one of `tp_size` ranks; MLPs are also the experts of a token."""
    parts = MLP_PARTS if part == "mlp" else (part,)
    rows = [
        (row.kind, row.shard_shape(tp_size), row.active * row.num_experts)
        for row in layer_matrices(model)
        if row.part in parts
    ]
    given = sum(shape[0] * times for kind, shape, times in rows if kind is not Kind.ROW_PARALLEL)
    return Widths(given, sum(shape[1] * times for kind, shape, times in rows if kind is Kind.ROW_PARALLEL))


def attended_channels(model: ModelConfig) -> int:
    """Channels of a head as attention's kernel has it: its own, and those of positions."""
    return model.kv_channels + traits_of(model).position_channels


def tensor_parallel_units(model: ModelConfig) -> dict[str, int]:
    """The units that TP divides, in words, and how many of each a model has; experts are not cut by TP."""
    cut = [row for row in weight_rows(model) if row.part in MLP_PARTS[:2] and row.kind is Kind.ROW_PARALLEL]
    channels = math.gcd(*(row.shard_shape(1)[1] for row in cut))
    return {
        "heads": model.num_attention_heads,
        "key/value groups": model.num_query_groups,
        **({"MLP channels": channels} if channels else {}),
    }


for _family in (LLAMA, MISTRAL, QWEN2, QWEN3, BLOOM, MIXTRAL, QWEN2_MOE, QWEN3_MOE, DEEPSEEK_V2):
    register_family(_family)

__all__ = [
    "ALIBI_POSITIONS", "EVERY_LAYER", "EXPERT_FIELDS", "FAMILIES", "LATENT_FIELDS", "PRESETS", "SHAPE_FIELDS",
    "TRAIT_FIELDS", "UNUSED_ROTARY_BASE", "AttentionBackend", "ConfigReader", "Family", "HfAttention", "Kind",
    "ModelConfig", "StackedPart", "Traits", "TransformerImpl", "WeightRow", "attended_channels",
    "differences", "expert_layers", "family_called", "family_of", "layer_matrices", "no_class", "own_traits",
    "read_config", "register_family", "stacked_part",
    "tensor_parallel_units", "traits_of", "weight_rows", "widths", "with_family",
]  # fmt: skip
