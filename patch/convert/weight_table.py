"""One table for all families: megatron-core parameter names beside Hugging Face's, composed from the shape.

What a family has more or less (biases of q, k, v; norms of heads) is a field of ModelConfig, so a new family
is an entry in config/hf_config.py and, where its layers hold something new, a row here.
"""

from __future__ import annotations

from patch.config.schema import ModelConfig
from patch.convert.mappings import (
    GatedMLPMapping,
    HFTensor,
    QKVMapping,
    ReplicatedMapping,
    RowParallelMapping,
    VocabParallelMapping,
    WeightMapping,
)

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
TIED_OUTPUT = "output_layer.weight"
"""With tied embeddings this parameter (last stage, PP > 1) is a copy of the embedding."""

EMBEDDING_PARAMETER = "embedding.word_embeddings.weight"
GATE_AND_UP = "decoder.layers.*.mlp.linear_fc1.weight"

Table = dict[str, WeightMapping]
"""Parameter name -> mapping; `*` stands for the layer number, counted over the whole model."""

_OTHER_NAMES = {
    "decoder.layers.*.self_attention.linear_qkv.layer_norm_weight": "decoder.layers.*.input_layernorm.weight",
    "decoder.layers.*.mlp.linear_fc1.layer_norm_weight": "decoder.layers.*.pre_mlp_layernorm.weight",
    "final_layernorm.weight": "decoder.final_layernorm.weight",
}
"""What is named otherwise elsewhere, and the table's own name.

Norms that Transformer Engine fuses with the linear layer after them; Pai-Megatron-Patch's last norm.
"""


def table_name(name: str) -> str:
    """The table's name of a parameter in any spelling (`*` for the layer)."""
    return _OTHER_NAMES.get(name, name)


def checkpoint_key(name: str) -> str:
    """The key of a table's name in a torch_dist checkpoint, where layers are stacked on a leading axis."""
    fused = {plain: other for other, plain in _OTHER_NAMES.items() if "layers" in other}
    return fused.get(name, name).replace("layers.*.", "layers.")


def parameter_table(model: ModelConfig, padded_vocab_size: int) -> Table:
    """Every parameter of a model, in the order in which Hugging Face stores them."""
    width = model.hidden_size
    output = OUTPUT if model.untie_embeddings_and_output_weights else EMBEDDING

    def vocabulary(name: str) -> VocabParallelMapping:
        return VocabParallelMapping((HFTensor(name, (model.vocab_size, width)),), padded_vocab_size)

    return {
        EMBEDDING_PARAMETER: vocabulary(EMBEDDING),
        **{f"decoder.layers.*.{name}": mapping for name, mapping in _layer(model).items()},
        "decoder.final_layernorm.weight": ReplicatedMapping((HFTensor("model.norm.weight", (width,)),)),
        TIED_OUTPUT: vocabulary(output),
    }


def weights_table(model: ModelConfig, padded_vocab_size: int | None = None) -> Table:
    """The table of weights as they are stored: once, so a tied output layer is not among them.

    Args:
        padded_vocab_size: None: no padding.
    """
    table = parameter_table(model, padded_vocab_size or model.vocab_size)
    if not model.untie_embeddings_and_output_weights:
        del table[TIED_OUTPUT]
    return table


def _layer(model: ModelConfig) -> Table:
    width, mlp, head = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    queries, keys = model.num_attention_heads * head, model.num_query_groups * head

    def tensor(name: str, *shape: int) -> HFTensor:
        return HFTensor(f"model.layers.*.{name}", shape)

    def qkv(kind: str, *columns: int) -> QKVMapping:
        rows = {"q": queries, "k": keys, "v": keys}
        parts = [tensor(f"self_attn.{name}_proj.{kind}", count, *columns) for name, count in rows.items()]
        return QKVMapping(tuple(parts), model.num_query_groups)

    table: Table = {
        "input_layernorm.weight": ReplicatedMapping((tensor("input_layernorm.weight", width),)),
        "self_attention.linear_qkv.weight": qkv("weight", width),
        "self_attention.linear_proj.weight": RowParallelMapping(
            (tensor("self_attn.o_proj.weight", width, queries),)
        ),
        "pre_mlp_layernorm.weight": ReplicatedMapping((tensor("post_attention_layernorm.weight", width),)),
        "mlp.linear_fc1.weight": GatedMLPMapping(
            (tensor("mlp.gate_proj.weight", mlp, width), tensor("mlp.up_proj.weight", mlp, width))
        ),
        "mlp.linear_fc2.weight": RowParallelMapping((tensor("mlp.down_proj.weight", width, mlp),)),
    }
    if model.add_qkv_bias:
        table["self_attention.linear_qkv.bias"] = qkv("bias")
    if model.qk_layernorm:
        for name in ("q", "k"):
            norm = ReplicatedMapping((tensor(f"self_attn.{name}_norm.weight", head),))
            table[f"self_attention.{name}_layernorm.weight"] = norm
    return table


def hf_tensors(model: ModelConfig) -> list[HFTensor]:
    """Every tensor that a Hugging Face folder of this model must hold."""
    tensors: dict[str, HFTensor] = {}
    for mapping in parameter_table(model, model.vocab_size).values():
        per_layer = "*" in mapping.hf[0].name
        for layer in range(model.num_layers if per_layer else 1):
            tensors |= {tensor.name: tensor for tensor in mapping.at_layer(layer).hf}
    return list(tensors.values())
