"""Seconds of a run's messages, from the places of its ranks on the nodes and the links between these.

A ring collective over P ranks sends (P - 1) / P of its data, an all-reduce twice that, in P - 1 steps, each
of which waits for its slowest link. A group with several ranks on each node uses the network links of all of
them. With one rank a node NCCL's trees take log2(P) steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import ContextCommunication
from patch.families import attended_channels
from patch.layout import apart
from patch.plan.activations import boundary_bytes, dispatch_of
from patch.plan.memory import gathered_bytes
from patch.plan.parameters import element_bytes, parameters_of
from patch.plan.timing.machine import Machine

_FP32 = 4


class Group(NamedTuple):
    """Ranks that communicate with each other."""

    size: int
    per_node: int
    """Number of them on one node."""

    @property
    def nodes(self) -> int:
        """On how many nodes they are."""
        return -(-self.size // self.per_node)


def group_of(config: RunConfig, *axes: str, instances: int = 1, of_experts: bool = False) -> Group:
    """The group of ranks that differ in their places along these axes only.

    Args:
        config: the run; its processes are numbered along `--rank-order`, node by node.
        axes: of `tp`, `cp`, `dp` and `pp`; of experts `tp`, `ep`, `dp` and `pp`.
        instances: equal parts in which the group is cut; neighbours stay together.
        of_experts: whether these are the axes along which experts are distributed.
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
    """A reduce-scatter or an all-gather of elements among a group, or several in a row."""

    latency: float
    """Seconds of the smallest one."""
    seconds_per_byte: float
    """Seconds for a byte of the whole data, not of a rank's part."""
    bytes_per_element: float

    @property
    def twice(self) -> Collective:
        """Both of them, which are an all-reduce."""
        return Collective(2 * self.latency, 2 * self.seconds_per_byte, self.bytes_per_element)

    def seconds(self, numel: float) -> float:
        """Seconds for so many elements of the whole data; 0 in a group of one."""
        return self.latency + numel * self.bytes_per_element * self.seconds_per_byte


def ring(machine: Machine, group: Group, bytes_per_element: float) -> Collective:
    """A reduce-scatter or an all-gather among a group.

    Args:
        machine: its links.
        group: the ranks.
        bytes_per_element: of the message.
    """
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
    """Seconds of a message to the next rank along an axis.

    Args:
        machine: its links.
        config: the run.
        axis: `pp`, or `cp` for a ring.
        num_bytes: of the message.
    """
    distance, reached = apart(config.axes, axis), machine.reached
    if distance * (group_of(config, axis).size - 1) < config.parallel.nproc_per_node:
        return machine.node_link_latency + num_bytes / (machine.node_link_bandwidth * reached.node_link)
    return machine.network_latency + num_bytes / (machine.network_bandwidth * reached.network)


def summing_seconds(config: RunConfig, machine: Machine, share: float = 1.0) -> float:
    """Seconds of one gather of a micro-batch's hidden states over TP, or of one sum that is scattered.

    Args:
        config: the run.
        machine: its links.
        share: of the bytes of the run's precision.
    """
    parallel = config.parallel
    shares = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    return ring(machine, group_of(config, "tp"), 1).seconds(boundary_bytes(config) * shares * share)


def sent_bytes(config: RunConfig, way: ContextCommunication) -> int:
    """Bytes that a rank sends for one layer and micro-batch, forward and backward together.

    p2p: keys and values go to CP - 1 ranks in forward and again in backward, with their fp32 gradients.
    a2a: queries, keys, values and the result, and the gradients of each, less the share that stays. Key and
    value heads that CP does not divide are repeated.
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
    """Seconds of the messages to experts and back in one pass through one layer."""
    if not config.model.num_experts:
        return 0.0
    ranks = group_of(config, "tp", "ep", of_experts=True)
    # A ring of n bytes in all sends n (P - 1) / P from each rank, as an all-to-all of n bytes does.
    whole = dispatch_of(config).sent * ranks.size / max(ranks.size - 1, 1)
    return 2 * ring(machine, ranks, 1).seconds(whole)


class GradientTravel(NamedTuple):
    """How the replicas exchange gradients and weights."""

    reduce: Collective
    """Reduction of a bucket's gradients: a reduce-scatter, without sharding an all-reduce."""
    gather: Collective
    """Gather of a bucket's new weights; costs nothing without sharding."""
    across: Collective
    """With several instances of the distributed optimizer: of all shards' sums, once a step."""


def gradient_travel(config: RunConfig, machine: Machine, *, of_experts: bool) -> GradientTravel:
    """How the ranks that have the same weights exchange their gradients and new values.

    Args:
        config: the run.
        machine: its links.
        of_experts: whether these are experts, which several instances of the optimizer do not cut.
    """
    optimizer, instances = config.optimizer, config.parallel.num_distributed_optimizer_instances
    main = element_bytes(optimizer.main_grads_dtype)
    of_gradient = 2 if optimizer.grad_reduce_in_bf16 else main
    is_sharded, nothing = config.zero_stage.shares_states, Collective(0.0, 0.0, 0.0)
    instances = instances if is_sharded and not of_experts else 1
    axes = ("dp",) if of_experts else ("dp", "cp")
    group = group_of(config, *axes, instances=instances, of_experts=of_experts)
    once = ring(machine, group, of_gradient)
    if not is_sharded:
        return GradientTravel(once.twice, nothing, nothing)
    across = nothing
    if instances > 1:
        # Each rank sums its shard with those of the same place in the other instances, mostly on other nodes.
        across = ring(machine, Group(instances, 1), main / group.size).twice
    of_weight: float = element_bytes(config.training.precision)
    if not of_experts:  # on average: of the layers' matrices less, if these travel in 8 bits
        of_weight = gathered_bytes(config) / parameters_of(config, None)
    return GradientTravel(once, ring(machine, group, of_weight), across)
