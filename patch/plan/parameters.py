"""Number of parameters of the whole model, and of one rank of each pipeline stage; bytes of each.

They are counted from the rows of the weight table (`patch/families`), in the same way for every family.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, islice, pairwise
from typing import NamedTuple, TypeVar

from patch.config import ModelConfig, ParallelConfig, RunConfig
from patch.config.choices import PRECISIONS, Precision
from patch.config.experts import ExpertsConfig
from patch.families import EVERY_LAYER, Kind, WeightRow, expert_layers, layer_matrices, weight_rows
from patch.families.adapters import AdapterConfig, adapter_rows, base_rows, packed_bytes

_T = TypeVar("_T")


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
        return cls(tp_size, experts.expert_model_parallel_size, experts.etp_size(tp_size))


def layer_kinds(config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """Runs like this one whose layers are all alike: without experts, and with them.

    Both are the run itself where all layers of its model are alike.
    """
    model = config.model
    if len(expert_layers(model)) in (0, model.num_layers):
        return config, config
    dense, sparse = replace(model, num_experts=None), replace(model, moe_layer_freq=EVERY_LAYER)
    return replace(config, model=dense), replace(config, model=sparse)


def by_layer(config: RunConfig, measure: Callable[[RunConfig], _T]) -> list[list[_T]]:
    """The values of `measure` for each layer of each pipeline stage.

    Args:
        config: the run.
        measure: takes a run whose layers are all alike, and describes one.
    """
    dense, sparse = layer_kinds(config)
    has_experts = measure(sparse)
    if dense is sparse:
        return [[has_experts] * count for count in config.stage_layers]
    others, with_experts = measure(dense), expert_layers(config.model)
    every = iter([has_experts if n in with_experts else others for n in range(config.model.num_layers)])
    return [list(islice(every, count)) for count in config.stage_layers]


@lru_cache(maxsize=1024)  # a search of layouts asks for the same ones many times
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
    stages, stage_layers = parallel.pipeline_model_parallel_size, parallel.stage_layers(model.num_layers)
    cut = Cut.of(parallel, experts)
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
    return counts


def parameters_of(config: RunConfig, pp_rank: int | None, *, of_experts: bool = False) -> int:
    """Parameters that a rank of one place in the pipeline trains, or those of experts.

    With adapters they are theirs. None: on the rank with the most parameters.
    """
    return parameters_per_rank(
        config.model, config.parallel, config.experts, of_experts=of_experts, adapter=config.adapter
    )[place_of(config, pp_rank)]


def place_of(config: RunConfig, pp_rank: int | None) -> int:
    """A place in the pipeline; for None that of the rank with the most parameters."""
    if pp_rank is not None:
        return pp_rank
    of_ranks = parameters_per_rank(config.model, config.parallel, config.experts)
    return of_ranks.index(max(of_ranks))


class Frozen(NamedTuple):
    """Parameters on a rank that are not trained: the model's beside adapters."""

    dense: int
    in_4_bits: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.dense + self.in_4_bits


def frozen_of(config: RunConfig, pp_rank: int | None) -> Frozen:
    """Frozen parameters of a rank of one place in the pipeline; None: of the one with the most parameters."""
    if not config.adapter.lora_rank:
        return Frozen(0, 0)
    of_ranks, of_base = (
        parameters_per_rank(config.model, config.parallel, config.experts, of_base=each)
        for each in (False, True)
    )
    index = place_of(config, pp_rank)
    packed = of_base[index] if config.adapter.quantize_base else 0
    return Frozen(of_ranks[index] - packed, packed)


class Unit(NamedTuple):
    """Bytes of the weights that a module of one rank reads at once, as they travel to it."""

    others: int
    experts: int
    """They are shared by other ranks."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.others + self.experts


@lru_cache(maxsize=256)  # a search of layouts asks for the same ones many times
def freed_units(config: RunConfig) -> tuple[tuple[Unit, ...], ...]:
    """Units that `--data-parallel-sharding parameters` frees: embedding, layers, output layer.

    Parameters below `--param-persistence-threshold` stay whole, and so does a tied embedding that one stage
    reads at both ends. Trained adapters are not counted.

    Returns:
        those of each stage, in the order of the model and of a forward.
    """
    model, size = config.model, element_bytes(config.training.precision)
    cut, stage_layers = Cut.of(config.parallel, config.experts), config.stage_layers
    below = config.optimizer.param_persistence_threshold
    in_8_bits = config.training.fp8.layers(model.num_layers) if config.gathers_8_bit_weights else range(0)
    packed = {row.name for row in base_rows(model)} if config.adapter.quantize_base else set()
    has_two_ends = len(stage_layers) == 1 and not model.untie_embeddings_and_output_weights
    before, after = [Unit(0, 0)], [Unit(0, 0)]
    layers = [Unit(0, 0)] * model.num_layers
    for row in weight_rows(model):
        elements, is_of_expert = elements_per_rank(row, model, cut), row.part == "expert"
        is_whole = elements // (row.num_experts // cut.ep if is_of_expert else 1) < below
        if is_whole or (has_two_ends and not row.is_per_layer):
            continue
        num_bytes = packed_bytes(elements) if row.name in packed else elements * size
        units = layers if row.is_per_layer else before if row.is_before_layers else after
        narrow = in_8_bits if row.is_per_layer and row.is_matrix else ()
        for index in row.layers:
            others, experts = units[index]
            added = elements if index in narrow else num_bytes
            units[index] = Unit(others + added * (not is_of_expert), experts + added * is_of_expert)
    left = iter(layers)
    stages = [list(islice(left, count)) for count in stage_layers]
    stages[0] = before + stages[0]
    stages[-1] += after
    return tuple(map(tuple, stages))


def kept_parts(
    config: RunConfig, pp_rank: int | None, of_element: float = 1, *, is_shared: bool, extra: int = 0
) -> int:
    """Elements of gradients or states, or their bytes, of which a rank keeps all or its part.

    Args:
        config: the run.
        pp_rank: the rank's place in the pipeline; None: the heaviest one.
        of_element: bytes of one.
        is_shared: whether ranks that have the same weights share them.
        extra: further bytes of weights that are no experts.
    """
    count, experts = parameters_of(config, pp_rank), parameters_of(config, pp_rank, of_experts=True)
    others = (count - experts) * of_element + extra
    if not is_shared:
        return int(others + experts * of_element)
    return int(others // config.num_state_shares + experts * of_element // config.num_expert_copies)


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
