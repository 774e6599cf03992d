"""The weights of each pipeline stage by the part of a pass that uses them, and the buckets that hold them."""

from __future__ import annotations

from collections.abc import Sequence

from patch.config import ModelConfig, ParallelConfig
from patch.families import Kind, WeightRow, weight_rows
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT
from patch.plan.buckets import BucketRange, ParamRange, ParamSpec, lay_out
from patch.plan.parameters import elements_per_rank
from patch.plan.simulation.step import BucketUse

Weights = list[list[int]]
"""Of a stage: for each part of its forward the elements of its parameters, on one TP rank."""


def stage_weights(model: ModelConfig, parallel: ParallelConfig) -> list[Weights]:
    """The parts of each pipeline stage, in the order of the model.

    A part is a product with a matrix, and the vectors before it (biases and norms of queries and keys, which
    are small, count to the next one): the embedding, five in a layer (attention, the second of them, has no
    weights), the output layer. A tied embedding is counted on both of its stages.
    """
    layers, tp_size = parallel.stage_layers(model.num_layers), parallel.tensor_model_parallel_size
    rows = [(row, elements_per_rank(row, model, tp_size)) for row in weight_rows(model)]
    # A module's biases and norms stand behind all matrices in the table.
    modules = list(dict.fromkeys(_module(row) for row, _ in rows))
    rows.sort(key=lambda pair: modules.index(_module(pair[0])))
    layer: Weights = [[]]
    for row, numel in rows:
        if row.is_per_layer:
            layer[-1].append(numel)
            if row.is_matrix:
                layer += [[], []] if row.kind is Kind.QKV and len(layer) == 1 else [[]]
    rest = layer.pop()
    layer[-1] += rest
    stages = [[list(part) for part in layer * count] for count in layers]
    first = [numel for row, numel in rows if row.name == EMBEDDING_PARAMETER]
    is_copied = model.untie_embeddings_and_output_weights or len(layers) > 1
    last = [
        numel
        for row, numel in rows
        if not row.is_per_layer and row.name != EMBEDDING_PARAMETER and (row.name != TIED_OUTPUT or is_copied)
    ]
    stages[0].insert(0, first)
    stages[-1].append(last)
    return stages


def _module(row: WeightRow) -> str:
    """The module of a layer, or of the model, that has the parameter."""
    return row.name.removeprefix("decoder.layers.*.").split(".")[0]


def registered(parts: Weights) -> list[tuple[int, int]]:
    """Part and elements of each parameter of a stage, in the order of megatron-core's modules.

    Attention's output projection comes before its input projection.
    """
    order: list[tuple[int, int]] = []
    held: list[tuple[int, int]] = []
    for part, numels in enumerate(parts):
        own = [(part, numel) for numel in numels]
        if part + 1 < len(parts) and not parts[part + 1]:  # attention follows
            held = [own.pop()]
        elif own and held:
            own, held = [*own, *held], []
        order += own
    return order


def bucket_uses(
    stages: Sequence[Weights], bucket_size: int, num_shards: int, *, is_tapered: bool = True
) -> list[tuple[BucketUse, ...]]:
    """The buckets of the stages of one process, of each in the order of backward.

    Args:
        stages: of the process, in the order of the model.
        bucket_size: elements.
        num_shards: data-parallel ranks that share a bucket.
        is_tapered: as the optimizer's (buckets.py); else whole parameters until a bucket has `bucket_size`
            elements, as in megatron-core's DDP.
    """
    places = [
        (stage, *place)
        for stage, parts in reversed(list(enumerate(stages)))
        for place in reversed(registered(parts))
    ]
    specs = [ParamSpec(numel, 0, stage=stage) for stage, _, numel in places]
    lay = lay_out if is_tapered else _lay_out_evenly
    uses: list[list[BucketUse]] = [[] for _ in stages]
    for bucket in lay(specs, bucket_size, [num_shards]):
        parts = [places[param.parameter][1] for param in bucket.params]
        uses[bucket.stage].append(BucketUse(bucket.numel, min(parts), max(parts)))
    return [tuple(each) for each in uses]


def _lay_out_evenly(
    specs: Sequence[ParamSpec], bucket_size: int, num_shards: Sequence[int]
) -> list[BucketRange]:
    """Buckets of whole parameters; the padding, which is small, is left out."""
    buckets: list[BucketRange] = []
    is_open, end = False, 0
    for index, spec in enumerate(specs):
        own = ParamRange(index, end, end := end + spec.numel)
        if is_open and buckets[-1].stage == spec.stage:
            last = buckets.pop()
            buckets.append(BucketRange(last.begin, end, (*last.params, own), spec.stage))
        else:
            buckets.append(BucketRange(own.begin, end, (own,), spec.stage))
        is_open = buckets[-1].numel < bucket_size
    return buckets
