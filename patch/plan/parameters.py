"""Number of parameters of the whole model, and of one rank of each pipeline stage; bytes of each.

They are counted from the rows of the weight table (`patch/families`), in the same way for every family.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from patch.config import ModelConfig, ParallelConfig, RunConfig
from patch.config.choices import PRECISIONS, Precision
from patch.config.experts import ExpertsConfig
from patch.families import Kind, WeightRow, layer_matrices, weight_rows
from patch.families.adapters import AdapterConfig, adapter_rows, base_rows


def element_bytes(precision: Precision) -> int:
    """Bytes of a weight, an activation or a main gradient in this precision."""
    return PRECISIONS[precision].weight_bytes


def active_elements(model: ModelConfig) -> float:
    """Elements of a layer's weight matrices with which a token is multiplied; the mean of all layers."""
    rows = [row for row in weight_rows(model) if row.is_per_layer and row.is_matrix]
    elements = sum(len(row.layers) * row.active * row.num_elements for row in rows)
    mean, rest = divmod(elements, model.num_layers)
    return mean if rest == 0 else elements / model.num_layers


def total_parameters(model: ModelConfig, *, active: bool = False) -> float:
    """Parameters of the whole model without vocabulary padding, as transformers counts them.

    A tied embedding counts once.

    Args:
        model: the model.
        active: only those that one token uses.
    """
    return sum(
        (row.active if active else 1) * row.num_elements * len(row.layers)
        for row in weight_rows(model)
        if row.part != "head" or model.untie_embeddings_and_output_weights
    )


def trained_parameters(config: RunConfig) -> float:
    """Parameters of the whole model that a run trains: of its adapters, if it has any."""
    if not config.adapter.lora_rank:
        return total_parameters(config.model)
    return sum(row.num_elements * len(row.layers) for row in adapter_rows(config.model, config.adapter))


class Cut(NamedTuple):
    """In how many parts ranks divide what a model consists of."""

    tp: int
    ep: int = 1
    etp: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, experts: ExpertsConfig) -> Cut:
        """The parts of a run."""
        tp_size = parallel.tensor_model_parallel_size
        return cls(
            tp_size, experts.expert_model_parallel_size, experts.expert_tensor_parallel_size or tp_size
        )


def parameters_per_rank(
    model: ModelConfig,
    parallel: ParallelConfig,
    experts: ExpertsConfig = ExpertsConfig(),  # noqa: B008 - it never changes
    *,
    of_experts: bool = False,
    of_base: bool = False,
    adapter: AdapterConfig = AdapterConfig(),  # noqa: B008
) -> list[int]:
    """Parameters on one rank of each pipeline stage, first to last, vocabulary padding included.

    TP splits matrices, their biases and the vocabulary, EP and ETP experts; every rank has whole norms. With
    several stages, a tied embedding has a copy on the last one.

    Args:
        model, parallel, experts: of the run.
        of_experts: only those of experts.
        of_base: only the matrices that may have adapters.
        adapter: with a rank, those of adapters in place of the model's.
    """
    stage_layers, stages = (
        tuple(parallel.stage_layers(model.num_layers)),
        parallel.pipeline_model_parallel_size,
    )
    cut = Cut.of(parallel, experts)
    return list(_counts(model, cut, stages, stage_layers, of_experts, of_base, adapter))


@lru_cache(maxsize=256)
def _counts(
    model: ModelConfig,
    cut: Cut,
    stages: int,
    stage_layers: tuple[int, ...],
    of_experts: bool,
    of_base: bool,
    adapter: AdapterConfig,
) -> tuple[int, ...]:
    """`parameters_per_rank`; a search of layouts asks for the same ones many times."""
    has_output = model.untie_embeddings_and_output_weights or stages > 1
    counts, ends = [0] * stages, [0, *accumulate(stage_layers)]
    for row in base_rows(model) if of_base else adapter_rows(model, adapter) or weight_rows(model):
        elements = elements_per_rank(row, model, cut)
        if of_experts and row.part != "expert":
            continue
        if row.is_per_layer:
            for stage, (first, last) in enumerate(pairwise(ends)):
                counts[stage % stages] += elements * sum(first <= layer < last for layer in row.layers)
        elif row.is_before_layers:
            counts[0] += elements
        elif row.part != "head" or has_output:
            counts[-1] += elements
    return tuple(counts)


def parameters_of(config: RunConfig, pp_rank: int | None, *, of_experts: bool = False) -> int:
    """Parameters that a rank of one place in the pipeline trains, or those of experts.

    With adapters they are theirs. None: on the rank with the most parameters.
    """
    if pp_rank is None:
        of_ranks = parameters_per_rank(config.model, config.parallel, config.experts)
        pp_rank = of_ranks.index(max(of_ranks))
    return parameters_per_rank(
        config.model, config.parallel, config.experts, of_experts=of_experts, adapter=config.adapter
    )[pp_rank]


class Frozen(NamedTuple):
    """Parameters on a rank that are not trained: the model's beside adapters."""

    dense: int
    in_4_bits: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.in_4_bits


def frozen_of(config: RunConfig, pp_rank: int | None) -> Frozen:
    """Those of a rank of one place in the pipeline; None: of the one with the most parameters."""
    if not config.adapter.lora_rank:
        return Frozen(0, 0)
    of_ranks, of_base = (
        parameters_per_rank(config.model, config.parallel, config.experts, of_base=each)
        for each in (False, True)
    )
    index = of_ranks.index(max(of_ranks)) if pp_rank is None else pp_rank
    packed = of_base[index] if config.adapter.quantize_base else 0
    return Frozen(of_ranks[index] - packed, packed)


def kept_elements(config: RunConfig, pp_rank: int | None, *, is_shared: bool) -> float:
    """Elements of states or gradients that a rank keeps, if replicas share them or do not.

    Args:
        config: the run.
        pp_rank: the rank's place in the pipeline; None: the heaviest one.
        is_shared: whether ranks that have the same weights share them.
    """
    count, experts = parameters_of(config, pp_rank), parameters_of(config, pp_rank, of_experts=True)
    if not is_shared:
        return count
    return (count - experts) / config.num_state_shares + experts / config.num_expert_copies


def matrices_per_rank(config: RunConfig) -> list[int]:
    """Elements of each of a layer's weight matrices on a rank; of one expert."""
    cut = Cut.of(config.parallel, config.experts)
    return [_part_elements(row, cut) for row in layer_matrices(config.model)]


def elements_per_rank(row: WeightRow, model: ModelConfig, cut: Cut) -> int:
    """Elements of one rank's part of a parameter, vocabulary padding included; of all its experts."""
    if row.kind is Kind.VOCAB_PARALLEL:
        return row.num_elements // model.vocab_size * model.padded_vocab_size(cut.tp) // cut.tp
    return _part_elements(row, cut) * (row.num_experts // cut.ep if row.part == "expert" else 1)


def _part_elements(row: WeightRow, cut: Cut) -> int:
    return math.prod(row.shard_shape(cut.etp if row.part == "expert" else cut.tp))
