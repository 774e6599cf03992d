"""On how many machines a run trains, and with how few it can go on: --min-nodes and the sizes above it."""

from __future__ import annotations

from dataclasses import replace

from patch.config.pipeline_rules import interleaving_has_enough_batches, micro_batch_groups_fit
from patch.config.positions import refuse, where
from patch.config.rules import global_batch_divides, processes_fit
from patch.config.schema import RunConfig
from patch.config.sharding_rules import instances_share_states
from patch.device import MachineFacts
from patch.errors import ConfigError

_SIZE_RULES = (
    processes_fit,
    global_batch_divides,
    instances_share_states,
    interleaving_has_enough_batches,
    micro_batch_groups_fit,
)


def usable_sizes(config: RunConfig, machine: MachineFacts) -> list[int]:
    """The numbers of machines, from --min-nodes to --nnodes, that layout and global batch allow."""
    parallel = config.parallel
    fewer = range(parallel.min_nodes or parallel.nnodes, parallel.nnodes)
    return [*(size for size in fewer if _obstacle(config, machine, size) is None), parallel.nnodes]


def set_spares_aside(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """If layout and global batch do not allow all machines: the run on as many as they allow.

    Without --min-nodes and --max-restarts, which make the others spares, nothing changes.

    Args:
        config: the run on all machines.
        machine: one of them.
    Returns:
        The run, and a line for the log if machines are left over.
    """
    parallel = config.parallel
    if parallel.min_nodes is None or not parallel.max_restarts:
        return config, []
    sizes = range(parallel.nnodes, parallel.min_nodes - 1, -1)
    size = next((size for size in sizes if _obstacle(config, machine, size) is None), parallel.nnodes)
    if size == parallel.nnodes:
        return config, []
    note = (
        f"{size} of {parallel.nnodes} machines train, more do not fit layout and global batch: the rest wait"
    )
    return replace(config, parallel=replace(parallel, nnodes=size)), [f"{note} as spares"]


def fewer_machines_suffice(config: RunConfig, machine: MachineFacts) -> None:
    """The run can go on with --min-nodes machines: layout and global batch allow it, and it may restart."""
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
    """Why the run is not possible on so many machines; None if it is."""
    smaller = replace(config, parallel=replace(config.parallel, nnodes=size))
    try:
        for rule in _SIZE_RULES:
            rule(smaller, machine)
    except ConfigError as error:
        return error
    return None
