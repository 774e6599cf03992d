"""The families of models by `model_type` of transformers, and what the family of a model decides.

The family decides traits, weights and the class in transformers; see README.md. Imports neither torch nor
megatron.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from patch.errors import ConfigError, shown
from patch.families import bloom, deepseek, dense, experts, relatives
from patch.families.config_json import ConfigReader
from patch.families.dense import LLAMA
from patch.families.experts import ExpertsFamily, StackedPart, stacked_part
from patch.families.family import Family
from patch.families.layers import EVERY_LAYER, expert_layers, layers_with_rope, layers_with_window
from patch.families.shape import (
    ALIBI_POSITIONS,
    EXPERT_FIELDS,
    LATENT_FIELDS,
    OWN_FIELDS,
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
"""`model_type` -> family. A shape without a `model_type` belongs to the first family that computes it."""
PRESETS: dict[str, dict[str, Any]] = {}
"""MODEL_SIZE -> ModelConfig's fields. Fields that a preset leaves out keep their defaults."""


_NOT_BUILT = {
    "gpt_oss": "experts with biases, attention with sinks and weights in MXFP4 are not supported",
    "qwen3_next": "linear attention is not supported",
    "qwen3_5": "linear attention is not supported",
    "qwen3_5_text": "linear attention is not supported",
    "qwen3_5_moe": "linear attention is not supported",
    "gemma3": "models with images are not supported, only text models (gemma3_text)",
    "mistral3": "models with images are not supported, only text models (ministral3, mistral)",
}
"""Known families that are refused -> reason."""
_SAME_AS = {"kimi_k2": "deepseek_v3"}
"""`model_type` of remote code -> the family whose class it copies."""


def register_family(family: Family) -> None:
    """Make a family known to this process; it replaces a family of the same name.

    A program calls this in each of its processes, before it reads a command line.
    """
    FAMILIES[family.model_type] = family
    for size, fields in family.presets.items():
        PRESETS[size] = {"model_type": family.model_type, **fields}
    layer_matrices.cache_clear()
    widths.cache_clear()


def read_config(config: ConfigReader) -> dict[str, Any]:
    """Return ModelConfig's fields from a config.json of any family.

    Raises:
        ConfigError: `model_type` is not in FAMILIES, or the family does not support the model.
    """
    stated = config.values.get("model_type")
    model_type = _SAME_AS.get(stated, stated) if isinstance(stated, str) else stated
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        why = _NOT_BUILT.get(str(model_type), "this family is not supported")
        config.refuse("model_type", model_type, f"one of {', '.join(FAMILIES)}: {why}")
    return FAMILIES[model_type].read_config(config.by_table(model_type))


def family_called(model_type: str | None) -> Family:
    """Return the family of this name, or LLaMA's for None.

    Raises:
        ConfigError: there is no such family.
    """
    if model_type is None:
        return LLAMA
    if model_type not in FAMILIES:
        expected = f"auto or one of {', '.join(FAMILIES)}"
        raise ConfigError(f"got {shown(model_type)}, expected {expected}", field="model_type")
    return FAMILIES[model_type]


def traits_of(model: ModelConfig) -> Traits:
    """Return the traits of a model: the traits of its family, overlaid with the fields that are flags."""
    flags = {name: getattr(model, name) for name in TRAIT_FIELDS}
    if model.position_embedding_type is not None:
        flags["position_embedding_type"] = model.position_embedding_type
    return dataclasses.replace(family_called(model.model_type).traits, **flags)


def parts_unlike_llama(model: ModelConfig) -> dict[str, Any]:
    """Return the traits and OWN_FIELDS in which a model differs from LLaMA, with their values."""
    traits, plain = dataclasses.asdict(traits_of(model)), dataclasses.asdict(LLAMA.traits)
    own = {name: getattr(model, name) for name in model.own_fields}
    return {name: value for name, value in traits.items() if value != plain[name]} | own


def is_llama_like(model: ModelConfig) -> bool:
    """Return whether the layers have only LLaMA's parts, which Transformer Engine's layers have too."""
    return traits_of(model).is_llama_like and not model.own_fields


def own_traits(model_type: str | None) -> dict[str, Any]:
    """Return the traits that no flag changes, only the family; LLaMA and Mistral have the same."""
    traits = dataclasses.asdict(family_called(model_type).traits)
    return {name: value for name, value in traits.items() if name not in TRAIT_FIELDS}


def family_of(model: ModelConfig, model_type: str | None = None) -> Family | None:
    """Return the family whose class in transformers computes this model, or None if there is no such class.

    `model_type` is preferred (LLaMA; Mistral without a window), then the model's own family.
    """
    traits, slides = traits_of(model), model.window_size is not None
    matching = {
        name: family
        for name, family in FAMILIES.items()
        if _with_flags(family, model, traits) == traits
        and (family.slides_from is not None or not slides)
        and {*model.own_fields} <= family.own_fields
        and family.computes(model)
    }
    names = (model_type, model.model_type, *matching)
    return next((matching[name] for name in names if name is not None and name in matching), None)


def _with_flags(family: Family, model: ModelConfig, traits: Traits) -> Traits:
    """Traits of a family, with those of `traits` in which its models differ."""
    flags = {name: getattr(traits, name) for name in family.flags}
    if model.add_proj_bias:  # classes with it have biases of queries, keys and values too
        flags["add_qkv_bias"] = True
    return dataclasses.replace(family.traits, **flags)


def reason_without_hf_class(model: ModelConfig) -> tuple[str, str]:
    """Return why no class of transformers computes a model (`family_of` is None), and what to change."""
    if model.num_experts or model.is_latent:
        names = ", ".join(name for name, family in FAMILIES.items() if isinstance(family, ExpertsFamily))
        return (
            "no model of transformers has such experts between such attention",
            f"experts and traits of one of {names}",
        )
    family = family_called(model.model_type)
    if theirs := sorted({*model.own_fields} - family.own_fields):
        return (
            f"{family.architecture} of transformers has no {theirs[0]}",
            f"--{theirs[0].replace('_', '-')} left out",
        )
    if model.position_embedding_type not in (None, family.traits.position_embedding_type):
        return f"{family.architecture} of transformers has no ALiBi", "--position-embedding-type left out"
    if not family.computes(model):
        return (
            f"{family.architecture} of transformers supports only MHA and its standard widths",
            "as many key/value groups as heads, and the widths of its sizes",
        )
    return (
        "no model of transformers has biases on q, k, v and norms of their heads",
        "one of --add-qkv-bias and --qk-layernorm left out",
    )


def with_family(model: ModelConfig) -> ModelConfig:
    """Return the model with the `model_type` of the family that computes it, else of its own family.

    Raises:
        ConfigError: its `model_type` is not in FAMILIES.
    """
    family = family_of(model) or family_called(model.model_type)
    return dataclasses.replace(model, model_type=family.model_type)


def weight_rows(model: ModelConfig) -> tuple[WeightRow, ...]:
    """Return a row for each parameter of a model, in the order in which Hugging Face stores them.

    A model without a class in transformers also has rows: it trains but is not exported.
    """
    return tuple(row for row in stored_rows(model) if not row.is_buffer)


def stored_rows(model: ModelConfig) -> tuple[WeightRow, ...]:
    """Return a row for each parameter and each buffer that files contain; see `weight_rows`."""
    return family_called(model.model_type).rows(model, traits_of(model))


def differences(model: ModelConfig, theirs: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield fields with which `theirs` means another model: the field, its value, whether weights differ."""
    for field in (each.name for each in dataclasses.fields(model) if each.name in theirs):
        value = theirs[field]
        meaning = own_traits if field == "model_type" else lambda value: value
        if meaning(value) != meaning(getattr(model, field)):
            is_cut_otherwise = field in ("num_layers", "make_vocab_size_divisible_by")
            other = stored_rows(dataclasses.replace(model, **{field: value}))
            yield field, value, is_cut_otherwise or other != stored_rows(model)


@lru_cache(maxsize=64)  # a search of layouts asks for the same models many times
def layer_matrices(model: ModelConfig) -> tuple[WeightRow, ...]:
    """Return the weight matrices of the last layer, in the order of its products.

    If any layer has experts, the last layer has experts.
    """
    last = model.num_layers - 1
    return tuple(
        row for row in weight_rows(model) if row.is_per_layer and row.is_matrix and last in row.layers
    )


class Widths(NamedTuple):
    """Values of one token on a TP rank in one part of a layer; experts count as far as a token uses them."""

    out_features: float
    """Output channels of the column-parallel products: q, k and v; gate and up."""
    in_features: float
    """Input channels of the row-parallel products: the attention output; the MLP's product."""


@lru_cache(maxsize=256)
def widths(model: ModelConfig, part: Part, tp_size: int) -> Widths:
    """Return the widths of attention or MLP on one of `tp_size` ranks; "mlp" includes a token's experts."""
    parts = MLP_PARTS if part == "mlp" else (part,)
    rows = [
        (row.kind, row.shard_shape(tp_size), row.active * row.num_experts)
        for row in layer_matrices(model)
        if row.part in parts
    ]
    out_features = sum(shape[0] * times for kind, shape, times in rows if kind is not Kind.ROW_PARALLEL)
    return Widths(
        out_features, sum(shape[1] * times for kind, shape, times in rows if kind is Kind.ROW_PARALLEL)
    )


def attended_channels(model: ModelConfig) -> int:
    """Return the channels of a head in the attention kernel: its own channels and ALiBi's."""
    return model.kv_channels + traits_of(model).position_channels


def tensor_parallel_units(model: ModelConfig) -> dict[str, int]:
    """Return unit in words -> number that TP must divide; TP does not cut experts here."""
    cut = [row for row in weight_rows(model) if row.part in MLP_PARTS[:2] and row.kind is Kind.ROW_PARALLEL]
    channels = math.gcd(*(row.shard_shape(1)[1] for row in cut))
    return {
        "heads": model.num_attention_heads,
        "key/value groups": model.num_query_groups,
        **({"MLP channels": channels} if channels else {}),
    }


for _module in (dense, bloom, experts, deepseek, relatives):
    for _family in _module.ALL:
        register_family(_family)

__all__ = [
    "ALIBI_POSITIONS", "AttentionBackend", "ConfigReader", "EVERY_LAYER", "EXPERT_FIELDS", "FAMILIES",
    "Family", "HfAttention", "Kind", "LATENT_FIELDS", "ModelConfig", "OWN_FIELDS", "PRESETS",
    "SHAPE_FIELDS", "StackedPart", "TRAIT_FIELDS", "Traits", "TransformerImpl", "UNUSED_ROTARY_BASE",
    "WeightRow", "attended_channels", "differences", "expert_layers", "family_called", "family_of",
    "is_llama_like", "layer_matrices", "layers_with_rope", "layers_with_window", "own_traits",
    "parts_unlike_llama", "read_config", "reason_without_hf_class", "register_family", "stacked_part",
    "stored_rows", "tensor_parallel_units", "traits_of", "weight_rows", "widths", "with_family",
]  # fmt: skip
