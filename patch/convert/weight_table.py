"""The weight table of a family (patch/families) with a mapping for each row.

Building a table takes microseconds, so it is not cached.
"""

from __future__ import annotations

from patch.config.schema import ModelConfig
from patch.convert.mappings import (
    ColumnParallelMapping,
    HFTensor,
    QKVMapping,
    ReplicatedMapping,
    RowParallelMapping,
    VocabParallelMapping,
    WeightMapping,
)
from patch.families import Kind, WeightRow, weight_rows
from patch.families.weights import TIED_OUTPUT

OUTPUT = "lm_head.weight"
"""The output layer in transformers; a folder with tied embeddings may also contain it."""
GATE_AND_UP = "decoder.layers.*.mlp.linear_fc1.weight"

Table = dict[str, WeightMapping]
"""Parameter name -> mapping; `*` stands for the layer number, counted over the whole model."""

_OTHER_NAMES = {
    f"{theirs}{kind}": f"decoder.{ours}.{kind}"
    for theirs, ours in (
        ("decoder.layers.*.self_attention.linear_qkv.layer_norm_", "layers.*.input_layernorm"),
        ("decoder.layers.*.mlp.linear_fc1.layer_norm_", "layers.*.pre_mlp_layernorm"),
        ("final_layernorm.", "final_layernorm"),
    )
    for kind in ("weight", "bias")
}
"""Other spelling -> name in the table.

They are norms that Transformer Engine fuses with the following linear layer, and Pai-Megatron-Patch's final
norm.
"""


def table_name(name: str) -> str:
    """The table's name of a parameter in any spelling (`*` for the layer)."""
    return _OTHER_NAMES.get(name, name)


def checkpoint_key(name: str) -> str:
    """The key of a parameter in a torch_dist checkpoint, where layers are stacked on a leading axis."""
    fused = {plain: other for other, plain in _OTHER_NAMES.items() if "layers" in other}
    return fused.get(name, name).replace("layers.*.", "layers.")


def parameter_table(model: ModelConfig, padded_vocab_size: int) -> Table:
    """Every parameter of a model, in the order in which Hugging Face stores them."""
    return {row.name: _mapping(row, model, padded_vocab_size) for row in weight_rows(model)}


def weights_table(model: ModelConfig, padded_vocab_size: int | None = None) -> Table:
    """The table of the stored weights, without a tied output layer, which is not stored.

    Args:
        model: the shape of the model.
        padded_vocab_size: rows of the vocabulary with padding; None: no padding.
    """
    table = parameter_table(model, padded_vocab_size or model.vocab_size)
    if not model.untie_embeddings_and_output_weights:
        del table[TIED_OUTPUT]
    return table


def _mapping(row: WeightRow, model: ModelConfig, padded_vocab_size: int) -> WeightMapping:
    """The mapping for a row of the table."""
    hf = tuple(HFTensor(name, shape) for name, shape in row.hf.items())
    match row.kind:
        case Kind.REPLICATED:
            return ReplicatedMapping(hf)
        case Kind.ROW_PARALLEL:
            return RowParallelMapping(hf)
        case Kind.COLUMN_PARALLEL:
            return ColumnParallelMapping(hf)
        case Kind.QKV:
            return QKVMapping(hf, model.num_query_groups)
        case Kind.VOCAB_PARALLEL:
            return VocabParallelMapping(hf, padded_vocab_size)


def hf_tensors(model: ModelConfig) -> list[HFTensor]:
    """Every tensor that a Hugging Face folder of this model must contain."""
    tensors: dict[str, HFTensor] = {}
    for mapping in parameter_table(model, model.vocab_size).values():
        per_layer = "*" in mapping.hf[0].name
        for layer in range(model.num_layers if per_layer else 1):
            tensors |= {tensor.name: tensor for tensor in mapping.at_layer(layer).hf}
    return list(tensors.values())
