"""The rules of how pipeline stages are cut and processes are numbered, as those in rules.py."""

from __future__ import annotations

from collections.abc import Iterator

from patch.config.fields import value_of
from patch.config.pipeline_stages import layout_layers, layout_text, split_layers
from patch.config.positions import where
from patch.config.refusal import refuse
from patch.config.schema import RANK_AXES, RunConfig
from patch.device import MachineFacts

_LAYOUT = "pipeline_model_parallel_layout"
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
