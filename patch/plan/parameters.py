"""Parameters of the whole model, and of one rank of each pipeline stage; their bytes.

The counts come from the rows of the weight table (`patch/families`), in the same way for every family.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeVar

from patch.config import ModelConfig, ParallelConfig, RunConfig
from patch.config.choices import PRECISIONS, Precision
from patch.config.experts import ExpertsConfig
from patch.families import EVERY_LAYER, Kind, WeightRow, expert_layers, layer_matrices, weight_rows
from patch.families.adapters import AdapterConfig, BaseFormat, adapter_rows, base_rows, row_bytes
from patch.families.selection import Selection, trained_rows
from patch.features.optimizers import optimizer_of

_T = TypeVar("_T")


def element_bytes(precision: Precision) -> int:
    """Return the bytes of a weight, an activation or a main gradient in this precision."""
    return PRECISIONS[precision].weight_bytes


def elements_of(rows: Iterable[WeightRow], *, active: bool = False) -> float:
    """Return the elements of these rows in all layers; if `active`, only elements that one token uses."""
    return sum(len(row.layers) * (row.active if active else 1) * row.num_elements for row in rows)


def rows_that_train(config: RunConfig) -> tuple[WeightRow, ...]:
    """Return the rows of the weights that a run trains; only adapters if it has any."""
    return adapter_rows(config.model, config.adapter) or trained_rows(config.model, config.selection)


def layer_rows(rows: Iterable[WeightRow]) -> Iterator[WeightRow]:
    """Yield the matrices of layers."""
    return (row for row in rows if row.is_per_layer and row.is_matrix)


def active_elements(model: ModelConfig) -> float:
    """Return the elements of a layer's weight matrices that multiply a token; the mean over all layers."""
    elements = elements_of(layer_rows(weight_rows(model)), active=True)
    mean, rest = divmod(elements, model.num_layers)
    return mean if rest == 0 else elements / model.num_layers


def total_parameters(model: ModelConfig, *, active: bool = False) -> float:
    """Return the parameters without vocabulary padding, as transformers counts them: a tied embedding once.

    If `active`, count only parameters that one token uses.
    """
    return elements_of(_without_copies(weight_rows(model), model), active=active)


def trained_parameters(config: RunConfig) -> float:
    """Return the parameters of the whole model that a run trains; only its adapters if it has any."""
    return elements_of(_without_copies(rows_that_train(config), config.model))


def _without_copies(rows: Iterable[WeightRow], model: ModelConfig) -> Iterator[WeightRow]:
    return (row for row in rows if row.part != "head" or model.untie_embeddings_and_output_weights)


def trained_share(config: RunConfig, name: str) -> float:
    """Return the share of the layers with this parameter in which it has a gradient."""
    if config.adapter.is_on:
        return 0.0
    of_all, trained = (
        sum(len(row.layers) for row in trained_rows(config.model, selection) if row.name == name)
        for selection in (Selection(), config.selection)
    )
    return trained / of_all


def whole_matrices(config: RunConfig) -> list[WeightRow]:
    """Return the rows of matrices that the optimizer updates whole: all of layers, or none."""
    are_whole = optimizer_of(config.optimizer).updates_whole_matrices
    return [*layer_rows(rows_that_train(config))] if are_whole else []


def layer_kinds(config: RunConfig) -> tuple[RunConfig, RunConfig]:
    """Return this run with only dense layers and with only expert layers; uniform runs are returned as they
    are.
    """
    model = config.model
    if len(expert_layers(model)) in (0, model.num_layers):
        return config, config
    dense, sparse = replace(model, num_experts=None), replace(model, moe_layer_freq=EVERY_LAYER)
    return replace(config, model=dense), replace(config, model=sparse)


def by_layer(config: RunConfig, measure: Callable[[RunConfig], _T]) -> list[list[_T]]:
    """Return, for each layer of each pipeline stage, `measure` of a run with only such layers."""
    dense, sparse = layer_kinds(config)
    has_experts = measure(sparse)
    others = has_experts if dense is sparse else measure(dense)
    with_experts = expert_layers(config.model)
    every = (has_experts if n in with_experts else others for n in range(config.model.num_layers))
    return by_stage(every, config.stage_layers)


def by_stage(layers: Iterable[_T], stage_layers: Iterable[int]) -> list[list[_T]]:
    """Split the layers of a model, or what is known of them, over its stages."""
    left = iter(layers)
    return [list(islice(left, count)) for count in stage_layers]


@lru_cache(maxsize=1024)  # a search of layouts asks for the same models many times
def parameters_per_rank(
    model: ModelConfig,
    parallel: ParallelConfig,
    experts: ExpertsConfig = ExpertsConfig(),  # noqa: B008 - it never changes
    *,
    of_experts: bool = False,
    of_base: bool = False,
    of_matrices: bool = False,
    packed: BaseFormat | None = None,
    adapter: AdapterConfig = AdapterConfig(),  # noqa: B008
    selection: Selection = Selection(),  # noqa: B008
) -> list[int]:
    """Return the parameters on one rank of each pipeline stage, vocabulary padding included.

    TP splits matrices, their biases and the vocabulary; EP and ETP split experts; norms are replicated. With
    several stages, the last one has a copy of a tied embedding.

    Args:
        of_experts: count only experts.
        of_base: count only matrices that may have adapters.
        of_matrices: count only matrices of layers.
        packed: count their bytes in this format in place of parameters.
        adapter: if it has a rank, count adapters in place of the model.
        selection: count only weights that train.
    """
    stages, stage_layers = parallel.pipeline_model_parallel_size, parallel.stage_layers(model.num_layers)
    has_output = model.untie_embeddings_and_output_weights or stages > 1
    counts, layers = [0] * stages, by_stage(range(model.num_layers), stage_layers)
    rows = base_rows(model) if of_base else adapter_rows(model, adapter) or trained_rows(model, selection)
    for row in layer_rows(rows) if of_matrices else rows:
        if of_experts and row.part != "expert":
            continue
        elements = _elements(row, model, parallel, experts)
        elements = elements if packed is None else _packed_bytes(row, parallel, experts, elements, packed)
        if row.is_per_layer:
            for stage, own in enumerate(layers):
                counts[stage % stages] += elements * len({*own}.intersection(row.layers))
        elif row.is_before_layers:
            counts[0] += elements
        elif row.part != "head" or has_output:
            counts[-1] += elements
    return counts


def parameters_of(
    config: RunConfig, pp_rank: int | None, *, of_experts: bool = False, of_matrices: bool = False
) -> int:
    """Return the parameters that a pipeline rank trains, or only its experts; with adapters only adapters.

    `of_matrices` counts only matrices of layers.
    """
    return parameters_per_rank(
        config.model, config.parallel, config.experts, of_experts=of_experts, of_matrices=of_matrices,
        adapter=config.adapter, selection=config.selection,
    )[place_of(config, pp_rank)]  # fmt: skip


def place_of(config: RunConfig, pp_rank: int | None) -> int:
    """Return `pp_rank`, or for None the pipeline rank with the most parameters."""
    if pp_rank is not None:
        return pp_rank
    of_ranks = parameters_per_rank(config.model, config.parallel, config.experts)
    return of_ranks.index(max(of_ranks))


class Frozen(NamedTuple):
    """Parameters of the model on a rank that do not train."""

    dense: int
    in_4_bits: int
    packed_bytes: int
    """Bytes of those in 4 bits."""

    @property
    def total(self) -> int:
        """All frozen parameters."""
        return self.dense + self.in_4_bits


def frozen_of(config: RunConfig, pp_rank: int | None) -> Frozen:
    """Return the frozen parameters of a pipeline rank; None: the rank with the most parameters."""
    sections, index = (config.model, config.parallel, config.experts), place_of(config, pp_rank)
    trained = 0 if config.adapter.is_on else parameters_of(config, pp_rank)  # adapters are extra
    count, packed = parameters_per_rank(*sections)[index] - trained, config.adapter.quantize_base
    if packed is None:
        return Frozen(count, 0, 0)
    in_4_bits, num_bytes = (
        parameters_per_rank(*sections, of_base=True, packed=each)[index] for each in (None, packed)
    )
    return Frozen(count - in_4_bits, in_4_bits, num_bytes)


class Unit(NamedTuple):
    """Bytes of an FSDP unit's weights, in the dtype in which they are gathered."""

    others: int
    experts: int
    """Shared by other ranks (expert data parallelism) than `others`."""

    @property
    def total(self) -> int:
        """All weights."""
        return self.others + self.experts


@lru_cache(maxsize=256)  # a search of layouts asks for the same runs many times
def freed_units(config: RunConfig, *, as_kept: bool = False) -> tuple[tuple[Unit, ...], ...]:
    """Return the units of each stage that ZeRO-3 frees: embedding, layers, output layer; in order of forward.

    Parameters below `--param-persistence-threshold` stay whole. So does a tied embedding that one stage reads
    at both ends. Trained adapters are not counted. `as_kept`: see `memory.units_of`.
    """
    model, sizes, casts = config.model, PRECISIONS[config.training.precision], config.casts
    parallel, experts, stage_layers = config.parallel, config.experts, config.stage_layers
    below = config.optimizer.param_persistence_threshold
    cast_layers = casts.layers if casts.are_gathered and not as_kept else range(0)
    format = config.adapter.quantize_base
    packed = {row.name for row in base_rows(model)} if format else set()
    has_two_ends = len(stage_layers) == 1 and not model.untie_embeddings_and_output_weights
    before, after, layers = [[0, 0]], [[0, 0]], [[0, 0] for _ in range(model.num_layers)]
    for row in weight_rows(model):
        elements, is_of_expert = _elements(row, model, parallel, experts), row.part == "expert"
        of_one = elements // (row.num_experts // experts.expert_model_parallel_size if is_of_expert else 1)
        if of_one < below or (has_two_ends and not row.is_per_layer):
            continue
        num_bytes = elements * sizes.weight_bytes
        if format and row.name in packed:
            num_bytes = _packed_bytes(row, parallel, experts, elements, format)
        units = layers if row.is_per_layer else before if row.is_before_layers else after
        narrow = cast_layers if row.is_per_layer and row.is_matrix else ()
        for index in row.layers:
            units[index][is_of_expert] += elements * sizes.factor_bytes if index in narrow else num_bytes
    stages = by_stage(layers, stage_layers)
    stages[0] = before + stages[0]
    stages[-1] += after
    return tuple(tuple(Unit(*unit) for unit in stage) for stage in stages)


def elements_kept_per_rank(
    config: RunConfig,
    pp_rank: int | None,
    of_element: float = 1,
    *,
    is_shared: bool,
    extra: int = 0,
    of_matrices: bool = False,
) -> int:
    """Return the elements (times `of_element` bytes) of gradients or states that a rank keeps.

    Args:
        is_shared: whether ranks that have the same weights shard them.
        extra: further bytes of weights that are not experts.
        of_matrices: count only matrices of layers.
    """
    count, experts = (
        parameters_of(config, pp_rank, of_experts=each, of_matrices=of_matrices) for each in (False, True)
    )
    others = (count - experts) * of_element + extra
    if not is_shared:
        return int(others + experts * of_element)
    return int(others // config.state_group_size + experts * of_element // config.num_expert_copies)


def matrices_per_rank(config: RunConfig) -> list[int]:
    """Return the elements on a rank of each weight matrix of a layer; of one expert."""
    rows = layer_matrices(config.model)
    return [math.prod(_part_shape(row, config.parallel, config.experts)) for row in rows]


def _elements(row: WeightRow, model: ModelConfig, parallel: ParallelConfig, experts: ExpertsConfig) -> int:
    """Elements of a parameter on one rank, of all its experts, vocabulary padding included."""
    tp_size = parallel.tensor_model_parallel_size
    if row.kind is Kind.VOCAB_PARALLEL:
        return row.num_elements // model.vocab_size * model.padded_vocab_size(tp_size) // tp_size
    own_experts = row.num_experts // experts.expert_model_parallel_size if row.part == "expert" else 1
    return math.prod(_part_shape(row, parallel, experts)) * own_experts


def _packed_bytes(
    row: WeightRow, parallel: ParallelConfig, experts: ExpertsConfig, elements: int, format: BaseFormat
) -> int:
    """Bytes of some rows of a matrix on one rank."""
    columns = _part_shape(row, parallel, experts)[1]
    return elements // columns * row_bytes(columns, format)


def _part_shape(row: WeightRow, parallel: ParallelConfig, experts: ExpertsConfig) -> tuple[int, ...]:
    tp_size = parallel.tensor_model_parallel_size
    return row.shard_shape(experts.etp_size(tp_size) if row.part == "expert" else tp_size)
