"""The rules of how pipeline stages are cut and processes are numbered, as those in rules.py."""

from __future__ import annotations

from collections.abc import Iterator

from patch.config.fields import FIELDS, value_of
from patch.config.pipeline_stages import can_be_micro_batch_group, layout_layers, layout_text, split_layers
from patch.config.positions import refuse, where
from patch.config.schema import RANK_AXES, RunConfig
from patch.device import MachineFacts

_LAYOUT = "pipeline_model_parallel_layout"
_OVERLAP, _FLUSH = "overlap_p2p_communication", "overlap_p2p_communication_warmup_flush"
_GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
_MOST_NAMED = 8
_ACCOUNTS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


def layout_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Stages by hand have all layers of the model, and each pipeline rank has as many; nothing else cuts."""
    parallel, num_layers = config.parallel, config.model.num_layers
    layout, pp_size = parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
    if layout is None:
        return
    layers = layout_layers(layout)
    for field in ("num_layers_per_virtual_pipeline_stage", *_ACCOUNTS):
        if value := value_of(config, field):
            instead = "false" if value is True else "0"
            why = "stages by hand say already how layers are cut"
            refuse(field, str(value).lower(), f"{instead}, or none at {where(_LAYOUT)}", why)
    such_as = _example(num_layers, pp_size)
    pp_text = f"{where('pipeline_model_parallel_size')} {pp_size}"
    if len(layers) % pp_size:
        refuse(_LAYOUT, layout, f"a multiple of {pp_text} stages{such_as}", f"it has {len(layers)}")
    if pp_size == 1 and len(layers) > 1:
        refuse(_LAYOUT, layout, f"one stage at {pp_text}", "one process has all layers")
    if sum(layers) != num_layers:
        why = f"it has {sum(layers)} layers, the model {num_layers}"
        refuse(_LAYOUT, layout, f"{num_layers} t{such_as}", why)


def _example(num_layers: int, pp_size: int) -> str:
    """A layout of such a model with one stage for each pipeline rank, as part of a message."""
    is_short = num_layers < pp_size
    if num_layers + 2 * is_short < pp_size:
        return ""
    layers = split_layers(num_layers, pp_size, with_embedding=is_short, with_loss=is_short)
    return f", such as {layout_text(layers)}"


def pipeline_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Every pipeline stage has a layer, or what counts as one."""
    parallel, pp_size = config.parallel, config.parallel.pipeline_model_parallel_size
    layers = parallel.num_split_layers(config.model.num_layers)
    if parallel.pipeline_model_parallel_layout is None and layers < pp_size:
        why = f"the model has {counted_layers(config, layers)}"
        refuse("pipeline_model_parallel_size", pp_size, f"at most {layers}", why)


def interleaving_has_enough_batches(config: RunConfig, machine: MachineFacts) -> None:
    """Interleaving needs PP micro-batches or more: so many pass a stage before the process changes stages."""
    count, pp_size = config.num_micro_batches, config.parallel.pipeline_model_parallel_size
    if config.virtual_pipeline_size > 1 and count < pp_size:
        training = config.training
        unit = training.micro_batch_size * config.data_parallel_size
        why = f"interleaved stages need as many micro-batches as PP={pp_size}, this is {count}"
        refuse("global_batch_size", training.global_batch_size, f"at least {unit * pp_size}", why)


def rank_order_is_whole(config: RunConfig, machine: MachineFacts) -> None:
    """The order of ranks names each axis once; axes of size 1 may be left out."""
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "dp": config.data_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
    }
    named, expected = parallel.rank_order.split("-"), "tp, cp, dp and pp in any order, such as tp-cp-pp-dp"
    if len({*named}) < len(named) or not {*named} <= {*RANK_AXES, "ep"}:
        refuse("rank_order", parallel.rank_order, expected, "it names each axis once, the fastest first")
    for axis, size in sizes.items():
        if size > 1 and axis not in named:
            refuse("rank_order", parallel.rank_order, expected, f"{axis} is missing, its size is {size}")


def messages_can_travel(config: RunConfig, machine: MachineFacts) -> None:
    """Messages between interleaved stages that do not overlap need three processes, and never overlap."""
    parallel, pp_size = config.parallel, config.parallel.pipeline_model_parallel_size
    is_overlapped = parallel.overlap_p2p_communication
    if config.virtual_pipeline_size > 1 and pp_size == 2 and not is_overlapped:
        expected = f"true, or {where('pipeline_model_parallel_size')} above 2"
        why = "two processes are neighbours on both sides, and could take a gradient for an activation"
        refuse(_OVERLAP, "false", expected, why)
    if parallel.overlap_p2p_communication_warmup_flush and not is_overlapped:
        expected = f"false, or true at {where(_OVERLAP)}"
        refuse(_FLUSH, "true", expected, "it extends the overlap")


def micro_batch_groups_fit(config: RunConfig, machine: MachineFacts) -> None:
    """The micro-batches of a step make up groups that upstream's interleaved schedule takes."""
    size, pp_size = value_of(config, _GROUP), config.parallel.pipeline_model_parallel_size
    count = config.num_micro_batches
    if size is None or config.virtual_pipeline_size == 1 or can_be_micro_batch_group(size, count, pp_size):
        return
    fitting = [str(n) for n in range(pp_size, count + 1) if can_be_micro_batch_group(n, count, pp_size)]
    expected = f"0 or one of {', '.join(fitting[:_MOST_NAMED])}" + (" ..." if fitting[_MOST_NAMED:] else "")
    why = f"each group of a step's {count} micro-batches, also the last one, has at least PP={pp_size}"
    refuse(_GROUP, size, expected, why)


def counted_layers(config: RunConfig, number: int) -> str:
    """So many layers, and what else was counted as one, in words."""
    words = zip(_ACCOUNTS, ("embedding", "loss"), strict=True)
    counted = [word for field, word in words if value_of(config, field)]
    return f"{number} layers" + (f" ({' and '.join(counted)} counted)" if counted else "")


def pipeline_notes(config: RunConfig, machine: MachineFacts) -> Iterator[str]:
    """Flags of a pipeline that have no effect in this run."""
    if config.parallel.pipeline_model_parallel_size == 1:
        for field in (_LAYOUT, *_ACCOUNTS):
            if value_of(config, field):
                yield f"{where(field)} has no effect at PP=1"
    if config.virtual_pipeline_size == 1:
        for field in (_OVERLAP, _FLUSH, _GROUP):
            if value_of(config, field) != FIELDS[field].default:
                yield f"{where(field)} has no effect without interleaved stages (MP_VP)"
