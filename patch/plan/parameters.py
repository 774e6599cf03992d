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


class Amount(NamedTuple):
    """Elements or bytes of weights on a rank; experts have other data-parallel ranks than `others`."""

    others: int
    experts: int

    @property
    def total(self) -> int:
        """Sum of both."""
        return self.others + self.experts

    def kept(self, config: RunConfig, of_element: float = 1, *, is_shared: bool, extra: int = 0) -> int:
        """Return what a rank keeps of gradients or states with `of_element` bytes for each element.

        Args:
            is_shared: whether ranks that have the same weights shard them.
            extra: further bytes of weights that are not experts.
        """
        others, experts = self.others * of_element + extra, self.experts * of_element
        if not is_shared:
            return int(others + experts)
        return int(others // config.state_group_size + experts // config.num_expert_copies)


class RankParameters(NamedTuple):
    """Parameters on one rank of a pipeline stage, vocabulary padding included."""

    model: Amount
    trained: Amount
    """With adapters only adapters."""
    matrices: Amount
    """Matrices of layers among `trained`."""
    in_4_bits: Amount
    packed: Amount
    """Bytes of those in 4 bits."""
    has_adapters: bool

    @property
    def frozen(self) -> int:
        """Parameters of the model that do not train."""
        return self.model.total - (0 if self.has_adapters else self.trained.total)

    @property
    def dense(self) -> int:
        """Frozen parameters that are not in 4 bits."""
        return self.frozen - self.in_4_bits.total


@lru_cache(maxsize=1024)  # a search of layouts asks for the same models many times
def _of_stages(
    model: ModelConfig, parallel: ParallelConfig, experts: ExpertsConfig, adapter: AdapterConfig,
    selection: Selection,
) -> list[RankParameters]:  # fmt: skip
    """Parameters on one rank of each pipeline stage.

    TP splits matrices, their biases and the vocabulary; EP and ETP split experts; norms are replicated. With
    several stages, the last one has a copy of a tied embedding.
    """
    stages, stage_layers = parallel.pipeline_model_parallel_size, parallel.stage_layers(model.num_layers)
    has_output = model.untie_embeddings_and_output_weights or stages > 1
    layers = [{*own} for own in by_stage(range(model.num_layers), stage_layers)]

    def count(rows: Iterable[WeightRow], format: BaseFormat | None = None) -> list[Amount]:
        counts = [[0, 0] for _ in range(stages)]
        for row in rows:
            size, is_expert = _size(row, model, parallel, experts, format), row.part == "expert"
            if row.is_per_layer:
                for stage, own in enumerate(layers):
                    counts[stage % stages][is_expert] += size * len(own.intersection(row.layers))
            elif row.is_before_layers:
                counts[0][is_expert] += size
            elif row.part != "head" or has_output:
                counts[-1][is_expert] += size
        return [Amount(*each) for each in counts]

    trained, format = adapter_rows(model, adapter) or trained_rows(model, selection), adapter.quantize_base
    base = base_rows(model) if format else ()
    whole, matrices = count(weight_rows(model)), count(layer_rows(trained))
    of_stages = zip(whole, count(trained), matrices, count(base), count(base, format), strict=True)
    return [RankParameters(*amounts, has_adapters=adapter.is_on) for amounts in of_stages]


def of_stages(config: RunConfig) -> list[RankParameters]:
    """Return the parameters on one rank of each pipeline stage."""
    return _of_stages(config.model, config.parallel, config.experts, config.adapter, config.selection)


def parameters_per_rank(config: RunConfig) -> list[int]:
    """Return the number of the model's parameters on one rank of each pipeline stage."""
    return [stage.model.total for stage in of_stages(config)]


def place_of(config: RunConfig, pp_rank: int | None) -> int:
    """Return `pp_rank`, or for None the pipeline rank with the most parameters."""
    if pp_rank is not None:
        return pp_rank
    of_ranks = parameters_per_rank(config)
    return of_ranks.index(max(of_ranks))


def parameters_of(config: RunConfig, pp_rank: int | None) -> RankParameters:
    """Return the parameters of a pipeline rank; None: the rank with the most parameters."""
    return of_stages(config)[place_of(config, pp_rank)]


@lru_cache(maxsize=256)  # a search of layouts asks for the same runs many times
def freed_units(config: RunConfig, *, as_kept: bool = False) -> tuple[tuple[Amount, ...], ...]:
    """Return the units of each stage that ZeRO-3 frees: embedding, layers, output layer; in order of forward.

    Bytes are those of the dtype in which weights are gathered.
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
        elements, is_expert = _size(row, model, parallel, experts), row.part == "expert"
        of_one = elements // (row.num_experts // experts.expert_model_parallel_size if is_expert else 1)
        if of_one < below or (has_two_ends and not row.is_per_layer):
            continue
        num_bytes = elements * sizes.weight_bytes
        if row.name in packed:
            num_bytes = _size(row, model, parallel, experts, format)
        units = layers if row.is_per_layer else before if row.is_before_layers else after
        narrow = cast_layers if row.is_per_layer and row.is_matrix else ()
        for index in row.layers:
            units[index][is_expert] += elements * sizes.factor_bytes if index in narrow else num_bytes
    stages = by_stage(layers, stage_layers)
    stages[0] = before + stages[0]
    stages[-1] += after
    return tuple(tuple(Amount(*unit) for unit in stage) for stage in stages)


def matrices_per_rank(config: RunConfig) -> list[int]:
    """Return the elements on a rank of each weight matrix of a layer; of one expert."""
    rows = layer_matrices(config.model)
    return [math.prod(_part_shape(row, config.parallel, config.experts)) for row in rows]


def _size(
    row: WeightRow, model: ModelConfig, parallel: ParallelConfig, experts: ExpertsConfig,
    format: BaseFormat | None = None,
) -> int:  # fmt: skip
    """Elements of a row on one rank, all its experts and vocabulary padding included; bytes in `format`."""
    tp_size = parallel.tensor_model_parallel_size
    if row.kind is Kind.VOCAB_PARALLEL:
        return row.num_elements // model.vocab_size * model.padded_vocab_size(tp_size) // tp_size
    shape = _part_shape(row, parallel, experts)
    if format is not None:
        shape = shape[0], row_bytes(shape[1], format)
    own_experts = row.num_experts // experts.expert_model_parallel_size if row.part == "expert" else 1
    return math.prod(shape) * own_experts


def _part_shape(row: WeightRow, parallel: ParallelConfig, experts: ExpertsConfig) -> tuple[int, ...]:
    tp_size = parallel.tensor_model_parallel_size
    return row.shard_shape(experts.etp_size(tp_size) if row.part == "expert" else tp_size)
