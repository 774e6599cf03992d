"""What a family may ask of a model: the fields of ModelConfig that it reads, and the traits of its layers."""
# ruff: noqa: D102  what each field is says patch/config/schema.py

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Fields = Mapping[str, Any]
"""ModelConfig's fields -> values. `window_size` is megatron-core's: (tokens to the left, 0), or None."""

Window = tuple[int, int] | None
"""Tokens to the left and to the right that a token attends to; None: all before it."""


class ModelShape(Protocol):
    """ModelConfig as a family sees it: this package is below `patch.config` and does not import it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def num_attention_heads(self) -> int: ...
    @property
    def num_query_groups(self) -> int: ...
    @property
    def kv_channels(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def norm_epsilon(self) -> float: ...
    @property
    def rotary_base(self) -> float: ...
    @property
    def use_rope_scaling(self) -> bool: ...
    @property
    def rope_scaling_factor(self) -> float: ...
    @property
    def rope_low_freq_factor(self) -> float: ...
    @property
    def rope_high_freq_factor(self) -> float: ...
    @property
    def rope_original_max_position(self) -> int: ...
    @property
    def add_qkv_bias(self) -> bool: ...
    @property
    def qk_layernorm(self) -> bool: ...
    @property
    def window_size(self) -> Window: ...
    @property
    def untie_embeddings_and_output_weights(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a model's layers are made of. Names and values are those of megatron-core's TransformerConfig.

    A type with one value says what the model code can build; a family with another one widens the type, and
    mypy shows the places in `patch/model` that have to know it.
    """

    normalization: Literal["RMSNorm"] = "RMSNorm"
    activation: Literal["silu"] = "silu"
    """In the MLP; as config.json's `hidden_act` spells it."""
    gated_linear_unit: bool = True
    """Whether the MLP multiplies the activation with a second projection (`up`)."""
    add_bias_linear: bool = False
    """Biases on every linear layer."""
    add_qkv_bias: bool = False
    """Biases on queries, keys and values only."""
    qk_layernorm: bool = False
    """A norm of each query and key head."""
    position_embedding_type: Literal["rope"] = "rope"


def traits_of(model: ModelShape) -> Traits:
    """The traits that a model's fields ask for. A new trait has its field in ModelConfig and is read here."""
    return Traits(add_qkv_bias=model.add_qkv_bias, qk_layernorm=model.qk_layernorm)


WEIGHT_FIELDS: frozenset[str] = frozenset(
    {
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "vocab_size",
        "untie_embeddings_and_output_weights",
        "add_qkv_bias",
        "qk_layernorm",
    }
)
"""Fields that decide which weights a model has, and their shapes; the others change what is computed."""

TYPE_FIELDS: frozenset[str] = frozenset({"add_qkv_bias", "qk_layernorm", "window_size"})
"""Fields that decide which family a model belongs to, and so config.json's `model_type`."""
