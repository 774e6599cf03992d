"""Rules of how a model, a sequence and a batch are split over ranks, and over how many machines.

`usable_sizes` and `set_spares_aside` tell on how few machines a run can continue (--min-nodes).
"""

from __future__ import annotations

import math

from patch.checks.model import divisors
from patch.checks.run_length import global_batch_divides
from patch.config.choices import ZeroStage
from patch.config.fields import value_of, with_values
from patch.config.positions import refuse, where
from patch.config.schema import RANK_AXES, OptimizerConfig, RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.families import tensor_parallel_units
from patch.layout.pipeline_stages import can_be_micro_batch_group, layout_layers, layout_text, split_layers
from patch.text import counted


def tensor_parallel_divides(config: RunConfig, machine: MachineFacts) -> None:
    """Require TP to divide the number of query heads, key/value groups and MLP channels."""
    tp_size, cuts = config.parallel.tensor_model_parallel_size, tensor_parallel_units(config.model)
    if any(count % tp_size for count in cuts.values()):
        found = ", ".join(f"{count} {what}" for what, count in cuts.items())
        legal = divisors(*cuts.values())
        why = f"it divides each of the model's {found}"
        refuse("tensor_model_parallel_size", tp_size, f"one of {legal}", why)


def interleaving_divides(config: RunConfig, machine: MachineFacts) -> None:
    """Require interleaving to give every rank several stages, all with the same number of layers."""
    pp_size, field = config.parallel.pipeline_model_parallel_size, "num_layers_per_virtual_pipeline_stage"
    layers = config.parallel.num_layers_per_virtual_pipeline_stage
    num_layers = config.parallel.num_split_layers(config.model.num_layers)
    layers_per_process, remainder = divmod(num_layers, pp_size)
    if layers and remainder:
        expected = f"0, or stages by hand ({where('pipeline_model_parallel_layout')})"
        refuse(field, layers, expected, f"{counted_layers(config, num_layers)} do not divide by PP={pp_size}")
    if layers and layers_per_process % layers:
        expected = f"0 or one of {divisors(layers_per_process)}"
        refuse(field, layers, expected, f"a process has {counted_layers(config, layers_per_process)}")


def context_parallel_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Require heads that context-parallel ranks can share, for all-to-all."""
    cp_size, tp_size = config.parallel.context_parallel_size, config.parallel.tensor_model_parallel_size
    heads = config.model.num_attention_heads // tp_size
    if config.parallel.cp_comm_type == "a2a" and not config.heads_divide_by_cp:
        of_rank = f" of a TP={tp_size} rank" if tp_size > 1 else ""
        why = f"CP={cp_size} ranks cannot share the {heads} query heads{of_rank} evenly"
        refuse("cp_comm_type", "a2a", "p2p or auto", why)


def processes_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Require whole replicas, and on a machine with GPUs one GPU for each process."""
    parallel = config.parallel
    tp_size, pp_size = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    sizes = (tp_size, pp_size, parallel.context_parallel_size)
    replica = math.prod(sizes)
    if config.world_size % replica:
        machines, processes = counted(parallel.nnodes, "machine"), counted(parallel.nproc_per_node, "process")
        why = f"{machines} x {processes} must make up whole replicas"
        expected = f"processes in all a multiple of {replica} (TP x PP x CP = {' x '.join(map(str, sizes))})"
        refuse("nproc_per_node", parallel.nproc_per_node, expected, why)
    if 0 < machine.cuda_devices < parallel.nproc_per_node:
        expected = f"at most {machine.cuda_devices}"
        refuse("nproc_per_node", parallel.nproc_per_node, expected, "each process needs its own GPU")


_LAYOUT = "pipeline_model_parallel_layout"
_OVERLAP = "overlap_p2p_communication"
_GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
_MOST_NAMED = 8
SPLIT_ACCOUNTING_FLAGS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Flags that count embedding and loss as layers."""


def layout_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Require all layers in a manual layout, equally many stages per pipeline rank, and no other split."""
    parallel, num_layers = config.parallel, config.model.num_layers
    layout, pp_size = parallel.pipeline_model_parallel_layout, parallel.pipeline_model_parallel_size
    if layout is None:
        return
    layers = layout_layers(layout)
    for field in ("num_layers_per_virtual_pipeline_stage", *SPLIT_ACCOUNTING_FLAGS):
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
    is_short = num_layers < pp_size
    if num_layers + 2 * is_short < pp_size:
        return ""
    layers = split_layers(num_layers, pp_size, with_embedding=is_short, with_loss=is_short)
    return f", such as {layout_text(layers)}"


def pipeline_fits(config: RunConfig, machine: MachineFacts) -> None:
    """Require a layer in every pipeline stage; embedding and loss may count as layers."""
    parallel, pp_size = config.parallel, config.parallel.pipeline_model_parallel_size
    layers = parallel.num_split_layers(config.model.num_layers)
    if parallel.pipeline_model_parallel_layout is None and layers < pp_size:
        why = f"the model has {counted_layers(config, layers)}"
        refuse("pipeline_model_parallel_size", pp_size, f"at most {layers}", why)


def interleaving_has_enough_batches(config: RunConfig, machine: MachineFacts) -> None:
    """Require at least PP micro-batches for interleaving: that many pass a stage before its rank switches."""
    count, pp_size = config.num_micro_batches, config.parallel.pipeline_model_parallel_size
    if config.virtual_pipeline_size > 1 and count < pp_size:
        training = config.training
        unit = training.micro_batch_size * config.data_parallel_size
        why = f"interleaved stages need as many micro-batches as PP={pp_size}, this is {count}"
        refuse("global_batch_size", training.global_batch_size, f"at least {unit * pp_size}", why)


def rank_order_is_whole(config: RunConfig, machine: MachineFacts) -> None:
    """Require --rank-order to name each axis once; axes of size 1 may be omitted."""
    parallel = config.parallel
    named, expected = parallel.rank_order.split("-"), "tp, cp, dp and pp in any order, such as tp-cp-pp-dp"
    if len({*named}) < len(named) or not {*named} <= {*RANK_AXES, "ep"}:
        refuse("rank_order", parallel.rank_order, expected, "it names each axis once, the fastest first")
    for axis, size in config.axes.items():
        if size > 1 and axis not in named:
            refuse("rank_order", parallel.rank_order, expected, f"{axis} is missing, its size is {size}")


def p2p_overlap_is_possible(config: RunConfig, machine: MachineFacts) -> None:
    """Require overlapped p2p communication for interleaving at PP=2."""
    pp_size, is_overlapped = config.parallel.pipeline_model_parallel_size, value_of(config, _OVERLAP)
    if config.virtual_pipeline_size > 1 and pp_size == 2 and not is_overlapped:
        expected = f"true, or {where('pipeline_model_parallel_size')} above 2"
        why = "two processes are neighbours on both sides, and could take a gradient for an activation"
        refuse(_OVERLAP, "false", expected, why)


def micro_batch_groups_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Require micro-batch groups that megatron-core's interleaved schedule accepts."""
    size, pp_size = value_of(config, _GROUP), config.parallel.pipeline_model_parallel_size
    count = config.num_micro_batches
    if size is None or config.virtual_pipeline_size == 1 or can_be_micro_batch_group(size, count, pp_size):
        return
    fitting = [str(n) for n in range(pp_size, count + 1) if can_be_micro_batch_group(n, count, pp_size)]
    expected = f"0 or one of {', '.join(fitting[:_MOST_NAMED])}" + (" ..." if fitting[_MOST_NAMED:] else "")
    why = f"each group of a step's {count} micro-batches, also the last one, has at least PP={pp_size}"
    refuse(_GROUP, size, expected, why)


def counted_layers(config: RunConfig, number: int) -> str:
    """Return a number of layers in words, with a remark if embedding and loss are counted."""
    words = zip(SPLIT_ACCOUNTING_FLAGS, ("embedding", "loss"), strict=True)
    counted = [word for field, word in words if value_of(config, field)]
    return f"{number} layers" + (f" ({' and '.join(counted)} counted)" if counted else "")


def sharding_flags_agree(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse flags that contradict each other about the state that replicas share."""
    parallel = config.parallel
    if parallel.use_distributed_optimizer and parallel.data_parallel_sharding is ZeroStage.NONE:
        expected = "optimizer, gradients, parameters, auto, or none with DO=false"
        refuse("data_parallel_sharding", "none", expected, "DO=true shards the optimizer's states")


def instances_share_states(config: RunConfig, machine: MachineFacts) -> None:
    """Require distributed optimizer instances of equal size, with at least two ranks that share states."""
    instances, copies = config.parallel.num_distributed_optimizer_instances, config.num_weight_copies
    if instances == 1:
        return
    if config.sharding is ZeroStage.NONE:
        why = f"{where('data_parallel_sharding')} none: replicas shard no state"
        refuse("num_distributed_optimizer_instances", instances, "1", why)
    if copies % instances or copies == instances:
        fitting = [str(number) for number in range(1, copies) if copies % number == 0] or ["1"]
        why = f"{copies} replicas (DP x CP) form instances of equally many, at least two, ranks"
        refuse("num_distributed_optimizer_instances", instances, " or ".join(fitting), why)


def gradients_can_be_rounded(config: RunConfig, machine: MachineFacts) -> None:
    """Check rounded gradients of a run whose sharding is known."""
    if config.sharding != "auto":
        check_rounded_gradients(config.optimizer, config.sharding, config.num_weight_copies)


def check_rounded_gradients(optimizer: OptimizerConfig, stage: ZeroStage, num_copies: int) -> None:
    """Refuse bf16 gradient reduction by all-reduce: it sums in bf16, while a sharded sum stays in fp32."""
    if optimizer.grad_reduce_in_bf16 and not stage.shards_states and num_copies > 1:
        expected = f"false, or {where('data_parallel_sharding')} optimizer, gradients or auto"
        refuse("grad_reduce_in_bf16", "true", expected, "an all-reduce sums in the dtype of the message")


_SIZE_RULES = (
    processes_fit,
    global_batch_divides,
    instances_share_states,
    interleaving_has_enough_batches,
    micro_batch_groups_fit,
)


def usable_sizes(config: RunConfig, machine: MachineFacts) -> list[int]:
    """Return the numbers of machines, from --min-nodes to --nnodes, that layout and global batch allow."""
    return sorted({*_fitting_sizes(config, machine), config.parallel.nnodes})


def set_spares_aside(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Return the run on as many machines as layout and global batch allow, and a log line if machines remain.

    Without --min-nodes and --max-restarts nothing changes; with them, the remaining machines are spares.
    """
    parallel = config.parallel
    if parallel.min_nodes is None or not parallel.max_restarts:
        return config, []
    size = max(_fitting_sizes(config, machine), default=parallel.nnodes)
    if size == parallel.nnodes:
        return config, []
    note = (
        f"{size} of {parallel.nnodes} machines train, more do not fit layout and global batch: the rest wait"
    )
    return with_values(config, nnodes=size), [f"{note} as spares"]


def _fitting_sizes(config: RunConfig, machine: MachineFacts) -> list[int]:
    parallel = config.parallel
    sizes = range(parallel.min_nodes or parallel.nnodes, parallel.nnodes + 1)
    return [size for size in sizes if _obstacle(config, machine, size) is None]


def fewer_machines_suffice(config: RunConfig, machine: MachineFacts) -> None:
    """Require that layout, global batch and --max-restarts allow a run on --min-nodes machines."""
    parallel = config.parallel
    if parallel.min_nodes is None:
        return
    if parallel.min_nodes > parallel.nnodes:
        why = "the run starts with all machines"
        refuse("min_nodes", parallel.min_nodes, f"at most {where('nnodes')} {parallel.nnodes}", why)
    if parallel.min_nodes < parallel.nnodes and not parallel.max_restarts:
        why = "without a restart the run ends when a machine is lost"
        refuse("max_restarts", 0, f"at least 1 with {where('min_nodes')}", why)
    if (obstacle := _obstacle(config, machine, parallel.min_nodes)) is not None:
        raise ConfigError(
            f"got {parallel.min_nodes}, expected machines that can go on alone: {obstacle}", field="min_nodes"
        )


def _obstacle(config: RunConfig, machine: MachineFacts, size: int) -> ConfigError | None:
    smaller = with_values(config, nnodes=size)
    try:
        for rule in _SIZE_RULES:
            rule(smaller, machine)
    except ConfigError as error:
        return error
    return None
