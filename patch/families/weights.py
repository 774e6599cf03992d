"""The weight table as data: which Hugging Face tensors make up a parameter, and how TP splits it.

`patch/convert` copies weights by this table, `patch/plan` counts parameters by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from patch.families.shape import ModelConfig, traits_of

EMBEDDING_PARAMETER = "embedding.word_embeddings.weight"
TIED_OUTPUT = "output_layer.weight"
"""With tied embeddings and PP > 1 this parameter of the last stage is a copy of the embedding."""


class Kind(Enum):
    """How a parameter is laid out, and how tensor parallelism (TP) splits it."""

    REPLICATED = auto()
    """One tensor, complete on every TP rank, such as a norm's weight."""
    ROW_PARALLEL = auto()
    """One tensor whose columns are split over TP, as in megatron-core's RowParallelLinear."""
    VOCAB_PARALLEL = auto()
    """One tensor whose rows are padded to the padded vocabulary and split over TP."""
    GATED_MLP = auto()
    """Two tensors, gate and up. A TP rank stores its rows of gate, then its rows of up."""
    QKV = auto()
    """Three tensors. For each key/value group in turn: the rows of its queries, of its key, of its value."""


class WeightRow(NamedTuple):
    """One parameter of the model. In a layer's parameter, `*` stands for the layer's number."""

    name: str
    """megatron-core's name, with layers numbered over the whole model."""
    kind: Kind
    hf: Mapping[str, tuple[int, ...]]
    """The names and shapes of the Hugging Face tensors, in the order that `kind` states."""

    @property
    def is_per_layer(self) -> bool:
        """Whether every layer has this parameter."""
        return "*" in self.name

    @property
    def is_matrix(self) -> bool:
        """Whether the parameter is a matrix, not the vector of a norm or a bias."""
        return all(len(shape) > 1 for shape in self.hf.values())

    @property
    def num_elements(self) -> int:
        """Elements of the full (unsharded) parameter in one layer, without vocabulary padding."""
        return sum(math.prod(shape) for shape in self.hf.values())


def weight_rows(model: ModelConfig) -> tuple[WeightRow, ...]:
    """Every parameter of a model, in the order in which Hugging Face stores them.

    All families have these names, also a combination of traits for which transformers has no class: it can be
    trained but not exported. A tied output layer is included, under the embedding's Hugging Face name.
    """
    table = (model.vocab_size, model.hidden_size)
    output = "lm_head" if model.untie_embeddings_and_output_weights else "model.embed_tokens"
    norm = {"model.norm.weight": (model.hidden_size,)}
    return (
        WeightRow(EMBEDDING_PARAMETER, Kind.VOCAB_PARALLEL, {"model.embed_tokens.weight": table}),
        *_layer_weights(model),
        WeightRow("decoder.final_layernorm.weight", Kind.REPLICATED, norm),
        WeightRow(TIED_OUTPUT, Kind.VOCAB_PARALLEL, {f"{output}.weight": table}),
    )


def _layer_weights(model: ModelConfig) -> list[WeightRow]:
    """The parameters of a layer in the order of its computation; those that traits add come last."""
    hidden, ffn, head, traits = model.hidden_size, model.ffn_hidden_size, model.kv_channels, traits_of(model)
    query, key = model.num_attention_heads * head, model.num_query_groups * head
    qkv = {"q": query, "k": key, "v": key}

    def row(name: str, kind: Kind, hf: Mapping[str, tuple[int, ...]]) -> WeightRow:
        named = {f"model.layers.*.{tensor}": shape for tensor, shape in hf.items()}
        return WeightRow(f"decoder.layers.*.{name}", kind, named)

    matrices = {f"self_attn.{name}_proj.weight": (count, hidden) for name, count in qkv.items()}
    output = {"self_attn.o_proj.weight": (hidden, query)}
    gate_up = {"mlp.gate_proj.weight": (ffn, hidden), "mlp.up_proj.weight": (ffn, hidden)}
    rows = [
        row("input_layernorm.weight", Kind.REPLICATED, {"input_layernorm.weight": (hidden,)}),
        row("self_attention.linear_qkv.weight", Kind.QKV, matrices),
        row("self_attention.linear_proj.weight", Kind.ROW_PARALLEL, output),
        row("pre_mlp_layernorm.weight", Kind.REPLICATED, {"post_attention_layernorm.weight": (hidden,)}),
        row("mlp.linear_fc1.weight", Kind.GATED_MLP, gate_up),
        row("mlp.linear_fc2.weight", Kind.ROW_PARALLEL, {"mlp.down_proj.weight": (hidden, ffn)}),
    ]
    if traits.add_qkv_bias:
        biases = {f"self_attn.{name}_proj.bias": (count,) for name, count in qkv.items()}
        rows.append(row("self_attention.linear_qkv.bias", Kind.QKV, biases))
    if traits.qk_layernorm:
        for name in ("q", "k"):
            norm = {f"self_attn.{name}_norm.weight": (head,)}
            rows.append(row(f"self_attention.{name}_layernorm.weight", Kind.REPLICATED, norm))
    return rows
