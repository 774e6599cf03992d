"""Seconds of a run's messages, from the places of its ranks on the nodes and the links between nodes.

A ring collective over P ranks sends (P - 1) / P of its data; an all-reduce sends twice as much. It has P - 1
steps, each of which waits for the slowest link. A group with several ranks per node uses the network links of
all of them. With one rank per node NCCL's trees take log2(P) steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from patch.config import ModelConfig, RunConfig
from patch.config.choices import ContextCommunication
from patch.families import Kind, attended_channels, layer_matrices
from patch.layout import rank_stride
from patch.plan.activations import boundary_bytes, dispatch_of
from patch.plan.memory import gathered_bytes
from patch.plan.parameters import element_bytes, parameters_of
from patch.plan.timing.machine import Machine

_FP32 = 4


class Group(NamedTuple):
    """A process group and its placement on nodes."""

    size: int
    per_node: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.size // self.per_node)


def group_of(config: RunConfig, *axes: str, instances: int = 1, of_experts: bool = False) -> Group:
    """Return the group of ranks that differ only along these axes.

    Args:
        axes: of `tp`, `cp`, `dp` and `pp`; for experts of `tp`, `ep`, `dp` and `pp`.
        instances: equal parts into which the group is cut; neighbours stay together.
    """
    size, on_node, stride = 1, 1, 1
    for axis, length in (config.expert_axes if of_experts else config.axes).items():
        if axis in axes:
            size *= length
            on_node *= min(length, max(1, config.parallel.nproc_per_node // stride))
        stride *= length
    size //= instances
    return Group(size, min(on_node, size))


@dataclass(frozen=True, slots=True)
class Collective:
    """Cost of a reduce-scatter or an all-gather in a group, or of several in a row."""

    latency: float
    """Seconds of the smallest message."""
    seconds_per_byte: float
    """Seconds per byte of the whole data, not of a rank's part."""
    bytes_per_element: float

    @property
    def twice(self) -> Collective:
        """Both of them: an all-reduce."""
        return Collective(2 * self.latency, 2 * self.seconds_per_byte, self.bytes_per_element)

    def seconds(self, numel: float) -> float:
        """Return the seconds for this number of elements of the whole data; 0 in a group of one rank."""
        return self.latency + numel * self.bytes_per_element * self.seconds_per_byte


def ring(machine: Machine, group: Group, bytes_per_element: float) -> Collective:
    """Return the cost of a reduce-scatter or an all-gather in a group."""
    if group.size == 1:
        return Collective(0.0, 0.0, bytes_per_element)
    bandwidth, steps = machine.node_link_bandwidth * machine.reached.node_link, group.size - 1
    latency = steps * machine.node_link_latency
    if group.nodes > 1:
        of_node = group.per_node * machine.network_bandwidth * machine.reached.network
        bandwidth = min(bandwidth, of_node)
        across = math.ceil(math.log2(group.size)) if group.per_node == 1 else group.nodes
        inside = 0 if group.per_node == 1 else steps - group.nodes
        latency = across * machine.network_latency + inside * machine.node_link_latency
    return Collective(latency, (group.size - 1) / group.size / bandwidth, bytes_per_element)


def neighbour_seconds(machine: Machine, config: RunConfig, axis: str, num_bytes: float) -> float:
    """Return the seconds of a message to the next rank along an axis: `pp`, or `cp` for a ring."""
    distance, reached = rank_stride(config.axes, axis), machine.reached
    if distance * (group_of(config, axis).size - 1) < config.parallel.nproc_per_node:
        return machine.node_link_latency + num_bytes / (machine.node_link_bandwidth * reached.node_link)
    return machine.network_latency + num_bytes / (machine.network_bandwidth * reached.network)


def tp_collective_seconds(config: RunConfig, machine: Machine, share: float = 1.0) -> float:
    """Return the seconds of an all-gather or reduce-scatter of a micro-batch's hidden states over TP.

    `share` is the bytes of an element, as a share of the run's precision.
    """
    return ring(machine, group_of(config, "tp"), 1).seconds(tp_message_bytes(config) * share)


def tp_message_bytes(config: RunConfig) -> int:
    """Return the bytes of a micro-batch's hidden states, which all ranks of a TP group exchange."""
    return boundary_bytes(config) * config.sp_size


def tp_products(model: ModelConfig) -> tuple[list[int], list[int]]:
    """Return which of a layer's matrices have results that TP sums, and which have outputs that TP cuts."""
    rows = layer_matrices(model)
    over_tp = [index for index, row in enumerate(rows) if row.part not in ("expert", "router")]
    summed = [index for index in over_tp if rows[index].kind is Kind.ROW_PARALLEL]
    return summed, [index for index in over_tp if index not in summed]


def sent_bytes(config: RunConfig, way: ContextCommunication) -> int:
    """Return the bytes that a rank sends for one layer and micro-batch, forward and backward together.

    p2p: keys and values go to CP - 1 ranks in forward and again in backward, with their fp32 gradients. a2a:
    queries, keys, values and output, and the gradient of each, less the share that stays. Key and value heads
    that CP does not divide are repeated.
    """
    model, parallel = config.model, config.parallel
    tp_size, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    heads, groups = model.num_attention_heads // tp_size, model.num_query_groups // tp_size
    size = element_bytes(config.training.precision)
    channels = attended_channels(model) * config.micro_batch_tokens
    if way == "p2p":
        return 2 * groups * channels * (2 * size + _FP32) * (cp_size - 1)
    exchanged = 2 * (heads + math.lcm(groups, cp_size)) * channels
    return 2 * size * exchanged * (cp_size - 1) // cp_size


def dispatch_seconds(config: RunConfig, machine: Machine) -> float:
    """Return the seconds of dispatch to experts and combine in one pass through one layer."""
    if not config.model.num_experts:
        return 0.0
    ranks = group_of(config, "tp", "ep", of_experts=True)
    # In a ring of n bytes each rank sends n (P - 1) / P, as in an all-to-all of n bytes.
    whole = dispatch_of(config).sent * ranks.size / max(ranks.size - 1, 1)
    return 2 * ring(machine, ranks, 1).seconds(whole)


class DataParallelMessages(NamedTuple):
    """Collectives with which replicas exchange gradients and weights."""

    reduce: Collective
    """Reduction of a bucket's gradients: a reduce-scatter, or an all-reduce without sharding."""
    gather: Collective
    """All-gather of a bucket's new weights; free without sharding."""
    across: Collective
    """With several instances of the distributed optimizer: all-reduce of each rank's shards, once a step."""


def data_parallel_messages(config: RunConfig, machine: Machine, *, of_experts: bool) -> DataParallelMessages:
    """Return the collectives of ranks with equal weights; instances of the optimizer do not cut experts."""
    optimizer, instances = config.optimizer, config.parallel.num_distributed_optimizer_instances
    main = element_bytes(optimizer.main_grads_dtype)
    of_gradient = 2 if optimizer.grad_reduce_in_bf16 else main
    is_sharded, nothing = config.zero_stage.shards_states, Collective(0.0, 0.0, 0.0)
    instances = instances if is_sharded and not of_experts else 1
    axes = ("dp",) if of_experts else ("dp", "cp")
    group = group_of(config, *axes, instances=instances, of_experts=of_experts)
    once = ring(machine, group, of_gradient)
    if not is_sharded:
        return DataParallelMessages(once.twice, nothing, nothing)
    across = nothing
    if instances > 1:
        # Each rank all-reduces its shard with the same shard of other instances, mostly on other nodes.
        across = ring(machine, Group(instances, 1), main / group.size).twice
    of_weight: float = element_bytes(config.training.precision)
    trained = parameters_of(config, None).trained.total
    if trained and not of_experts:  # an average: some may be casts
        of_weight = gathered_bytes(config) / trained
    return DataParallelMessages(once, ring(machine, group, of_weight), across)
