"""How many parameters the model has, as a whole and on the ranks of each pipeline stage."""

from __future__ import annotations

from patch.config import ModelConfig, ParallelConfig


def layer_matrices(model: ModelConfig) -> int:
    """Elements of one layer's weight matrices: QKV, attention output, gate and up, down."""
    query = model.num_attention_heads * model.kv_channels
    key_value = 2 * model.num_query_groups * model.kv_channels
    attention = model.hidden_size * (query + key_value) + query * model.hidden_size
    return attention + 3 * model.hidden_size * model.ffn_hidden_size


def _layer_vectors(model: ModelConfig, tp_size: int) -> int:
    """Elements of one layer's norms, whole on every TP rank, and biases, which TP cuts."""
    heads = model.num_attention_heads + 2 * model.num_query_groups
    biases = heads * model.kv_channels // tp_size if model.add_qkv_bias else 0
    return 2 * model.hidden_size + biases + (2 * model.kv_channels if model.qk_layernorm else 0)


def total_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model without vocabulary padding, as transformers counts them.

    A tied embedding counts once.
    """
    layers = model.num_layers * (layer_matrices(model) + _layer_vectors(model, 1))
    tables = 2 if model.untie_embeddings_and_output_weights else 1
    return layers + tables * model.vocab_size * model.hidden_size + model.hidden_size


def parameters_per_rank(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Parameters on one rank of each pipeline stage, first to last, vocabulary padding included.

    TP cuts matrices and tables; norms are whole on every rank. A tied embedding has a copy on the
    last stage when there are several stages.
    """
    tp_size, stages = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    table = model.padded_vocab_size(tp_size) * model.hidden_size // tp_size
    layer = layer_matrices(model) // tp_size + _layer_vectors(model, tp_size)
    stage_layers = parallel.stage_layers(model.num_layers)
    counts = [sum(stage_layers[rank::stages]) * layer for rank in range(stages)]
    counts[0] += table
    counts[-1] += model.hidden_size
    if model.untie_embeddings_and_output_weights or stages > 1:
        counts[-1] += table
    return counts
