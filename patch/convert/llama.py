"""The LLaMA family's table: megatron-core parameter names beside Hugging Face's."""

from __future__ import annotations

from patch.config.schema import RunConfig
from patch.convert.mappings import Columns, GatedRows, GroupedQKV, HFTensor, Mapping, PaddedRows, Replicated

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"
TIED_OUTPUT = "output_layer.weight"
"""With tied embeddings this parameter (last stage, PP > 1) is a copy of the embedding."""

Table = dict[str, Mapping]
"""Parameter name -> mapping; `*` stands for the layer number, counted over the whole model."""


def llama_table(config: RunConfig) -> Table:
    """Every parameter of a LLaMA model, in the order in which Hugging Face stores them."""
    model = config.model
    width, mlp = model.hidden_size, model.ffn_hidden_size
    queries = model.num_attention_heads * model.kv_channels
    keys = model.num_query_groups * model.kv_channels
    output = OUTPUT if model.untie_embeddings_and_output_weights else EMBEDDING

    def layer(name: str, *shape: int) -> HFTensor:
        return HFTensor(f"model.layers.*.{name}.weight", shape)

    def vocabulary(name: str) -> PaddedRows:
        return PaddedRows((HFTensor(name, (model.vocab_size, width)),), config.padded_vocab_size)

    qkv = tuple(
        layer(f"self_attn.{name}_proj", rows, width)
        for name, rows in (("q", queries), ("k", keys), ("v", keys))
    )
    return {
        "embedding.word_embeddings.weight": vocabulary(EMBEDDING),
        "decoder.layers.*.input_layernorm.weight": Replicated((layer("input_layernorm", width),)),
        "decoder.layers.*.self_attention.linear_qkv.weight": GroupedQKV(qkv, model.num_query_groups),
        "decoder.layers.*.self_attention.linear_proj.weight": Columns(
            (layer("self_attn.o_proj", width, queries),)
        ),
        "decoder.layers.*.pre_mlp_layernorm.weight": Replicated((layer("post_attention_layernorm", width),)),
        "decoder.layers.*.mlp.linear_fc1.weight": GatedRows(
            (layer("mlp.gate_proj", mlp, width), layer("mlp.up_proj", mlp, width))
        ),
        "decoder.layers.*.mlp.linear_fc2.weight": Columns((layer("mlp.down_proj", width, mlp),)),
        "decoder.final_layernorm.weight": Replicated((HFTensor("model.norm.weight", (width,)),)),
        TIED_OUTPUT: vocabulary(output),
    }


def hf_tensors(config: RunConfig) -> list[HFTensor]:
    """Every tensor that a Hugging Face folder of this model must hold."""
    tensors: dict[str, HFTensor] = {}
    for mapping in llama_table(config).values():
        per_layer = "*" in mapping.hf[0].name
        for layer in range(config.model.num_layers if per_layer else 1):
            tensors |= {tensor.name: tensor for tensor in mapping.at_layer(layer).hf}
    return list(tensors.values())
