"""Number of parameters of the whole model, and of one rank of each pipeline stage; bytes of each.

They are counted from the rows of the weight table (`patch/families`), in the same way for every family.
"""

from __future__ import annotations

from functools import lru_cache

from patch.config import ModelConfig, ParallelConfig
from patch.config.choices import Precision
from patch.families import Kind, WeightRow, weight_rows
from patch.families.weights import TIED_OUTPUT


def element_bytes(precision: Precision) -> int:
    """Bytes of a weight, an activation or a main gradient in this precision; fp8 keeps them in bf16."""
    return 4 if precision == "fp32" else 2


def layer_matrices(model: ModelConfig) -> int:
    """Elements of one layer's weight matrices; each token is multiplied with all of these matrices."""
    return sum(row.num_elements for row in weight_rows(model) if row.is_per_layer and row.is_matrix)


def total_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model without vocabulary padding, as transformers counts them.

    A tied embedding counts once.
    """
    return sum(
        row.num_elements * (model.num_layers if row.is_per_layer else 1)
        for row in weight_rows(model)
        if row.name != TIED_OUTPUT or model.untie_embeddings_and_output_weights
    )


def parameters_per_rank(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Parameters on one rank of each pipeline stage, first to last, vocabulary padding included.

    TP splits matrices, their biases and the vocabulary; every rank has whole norms. With several stages, a
    tied embedding has a copy on the last one.
    """
    stage_layers = tuple(parallel.stage_layers(model.num_layers))
    stages = parallel.pipeline_model_parallel_size
    return list(_counts(model, parallel.tensor_model_parallel_size, stages, stage_layers))


@lru_cache(maxsize=256)
def _counts(model: ModelConfig, tp_size: int, stages: int, stage_layers: tuple[int, ...]) -> tuple[int, ...]:
    """`parameters_per_rank`; a search of layouts asks for the same ones many times."""
    has_output = model.untie_embeddings_and_output_weights or stages > 1
    counts = [0] * stages
    for row in weight_rows(model):
        elements = elements_per_rank(row, model, tp_size)
        if row.is_per_layer:
            for stage in range(stages):
                counts[stage] += elements * sum(stage_layers[stage::stages])
        elif row.name.startswith("embedding."):
            counts[0] += elements
        elif row.name != TIED_OUTPUT or has_output:
            counts[-1] += elements
    return tuple(counts)


def matrix_elements_per_rank(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Elements of one layer's weight matrices on a TP rank."""
    return layer_matrices(model) // parallel.tensor_model_parallel_size


def largest_matrix_per_rank(model: ModelConfig, parallel: ParallelConfig) -> int:
    """Elements of the largest of a layer's weight matrices on a TP rank."""
    matrices = [row.num_elements for row in weight_rows(model) if row.is_per_layer and row.is_matrix]
    return max(matrices) // parallel.tensor_model_parallel_size


def elements_per_rank(row: WeightRow, model: ModelConfig, tp_size: int) -> int:
    """Elements of one TP rank's part of a parameter, vocabulary padding included."""
    if row.kind is Kind.REPLICATED:
        return row.num_elements
    elements = row.num_elements
    if row.kind is Kind.VOCAB_PARALLEL:
        elements = elements // model.vocab_size * model.padded_vocab_size(tp_size)
    return elements // tp_size
