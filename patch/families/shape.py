"""What a family knows of a model: the fields of ModelConfig that it reads, and the traits of its layers."""
# ruff: noqa: D102  the fields are explained in patch/config/schema.py

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Fields = Mapping[str, Any]
"""ModelConfig's fields -> values. `window_size` is megatron-core's: (tokens to the left, 0), or None."""

Window = tuple[int, int] | None
"""How many tokens to its left and to its right a token attends to; None: all tokens before it."""


MOST_LAYERS = 10_000
"""The most layers of a model. The plan, the weight table and a pipeline have something for each layer."""


class ModelShape(Protocol):
    """The part of ModelConfig that families read; this package must not import `patch.config`."""

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
    def rope_scaling_type(self) -> str: ...
    @property
    def rope_scaling_factor(self) -> float: ...
    @property
    def rope_low_freq_factor(self) -> float: ...
    @property
    def rope_high_freq_factor(self) -> float: ...
    @property
    def rope_original_max_position(self) -> int: ...
    @property
    def yarn_beta_fast(self) -> float: ...
    @property
    def yarn_beta_slow(self) -> float: ...
    @property
    def yarn_correction_range_round_to_int(self) -> bool: ...
    @property
    def yarn_attention_factor(self) -> float | None: ...
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
    """The components of a model's layers. Names and values are those of megatron-core's TransformerConfig.

    A `Literal` with one value means that `patch/model` can build only that one. A family that needs another
    value adds it to the type; mypy then shows the places in `patch/model` that have to handle it.
    """

    normalization: Literal["RMSNorm"] = "RMSNorm"
    activation: Literal["silu"] = "silu"
    """The MLP's activation, spelled as in config.json's `hidden_act`."""
    gated_linear_unit: bool = True
    """Whether the MLP multiplies the activation by a second projection (`up`)."""
    add_bias_linear: bool = False
    """Biases on every linear layer."""
    add_qkv_bias: bool = False
    """Biases on queries, keys and values only."""
    qk_layernorm: bool = False
    """A norm of each query and key head."""
    position_embedding_type: Literal["rope"] = "rope"


def traits_of(model: ModelShape) -> Traits:
    """The traits that a model's fields set. A new trait gets a field in ModelConfig and is read here."""
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
"""Fields that decide which weights a model has, and their shapes; the others only change what is computed."""

TYPE_FIELDS: frozenset[str] = frozenset({"add_qkv_bias", "qk_layernorm", "window_size"})
"""Fields that decide the family of a model, and thus config.json's `model_type`."""
