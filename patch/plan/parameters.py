"""Number of parameters of the whole model, and of one rank of each pipeline stage; bytes of each.

They are counted from the rows of the weight table (`patch/families`), in the same way for every family.
"""

from __future__ import annotations

import math
from functools import lru_cache

from patch.config import ModelConfig, ParallelConfig, RunConfig
from patch.config.choices import PRECISIONS, Precision
from patch.families import Kind, WeightRow, layer_matrices, weight_rows


def element_bytes(precision: Precision) -> int:
    """Bytes of a weight, an activation or a main gradient in this precision."""
    return PRECISIONS[precision].weight_bytes


def active_elements(model: ModelConfig) -> float:
    """Elements of one layer's weight matrices with which a token is multiplied."""
    return sum(row.active * row.num_elements for row in layer_matrices(model))


def total_parameters(model: ModelConfig, *, active: bool = False) -> float:
    """Parameters of the whole model without vocabulary padding, as transformers counts them.

    A tied embedding counts once.

    Args:
        model: the model.
        active: only those that one token uses.
    """
    return sum(
        (row.active if active else 1) * row.num_elements * (model.num_layers if row.is_per_layer else 1)
        for row in weight_rows(model)
        if row.part != "head" or model.untie_embeddings_and_output_weights
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
        elif row.is_before_layers:
            counts[0] += elements
        elif row.part != "head" or has_output:
            counts[-1] += elements
    return tuple(counts)


def parameters_of(config: RunConfig, pp_rank: int | None) -> int:
    """Parameters on a rank of one place in the pipeline; None: on the heaviest one."""
    of_ranks = parameters_per_rank(config.model, config.parallel)
    return max(of_ranks) if pp_rank is None else of_ranks[pp_rank]


def matrices_per_rank(model: ModelConfig, parallel: ParallelConfig) -> list[int]:
    """Elements of each of a layer's weight matrices on a TP rank."""
    tp_size = parallel.tensor_model_parallel_size
    return [math.prod(row.shard_shape(tp_size)) for row in layer_matrices(model)]


def elements_per_rank(row: WeightRow, model: ModelConfig, tp_size: int) -> int:
    """Elements of one TP rank's part of a parameter, vocabulary padding included."""
    if row.kind is Kind.VOCAB_PARALLEL:
        return row.num_elements // model.vocab_size * model.padded_vocab_size(tp_size) // tp_size
    return math.prod(row.shard_shape(tp_size))
