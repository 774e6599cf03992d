"""The simulated step of a run on a machine, from the costs of its tasks (step_costs.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from patch.config import RunConfig
from patch.config.choices import ZeroStage
from patch.plan.context_parallel import sent_bytes
from patch.plan.parameters import element_bytes
from patch.plan.pipeline import Schedule
from patch.plan.simulation.bucket_uses import Weights, bucket_uses, stage_weights
from patch.plan.simulation.step import Cost, Host, Part, Stage, Step
from patch.plan.simulation.stragglers import Spread, slowdown
from patch.plan.timing.communication import Collective, neighbour_seconds
from patch.plan.timing.machine import Machine
from patch.plan.timing.step_costs import StepCosts, step_costs
from patch.plan.timing.step_time import offloaded_fraction

_PROCESSORS = {8: 108, 9: 132, 10: 148}
"""Streaming multiprocessors by the major version of compute capability: A100, H100 and H200, B200."""
_CHANNELS = 16
"""Of them that NCCL takes while messages travel between nodes. Assumed: NCCL's own choice is 8 to 32."""


def simulated_run(
    config: RunConfig, machine: Machine, *, is_tapered: bool = True, spread: Spread | None = None
) -> Step:
    """The step of a run, for `simulate_step`.

    Args:
        config: the run, its automatic choices made.
        machine: where it runs.
        is_tapered: the optimizer's own buckets; else megatron-core's (`bucket_uses`).
        spread: of ranks that are not equally fast; None: all are.
    """
    costs, schedule = step_costs(config, machine), Schedule.of(config)
    passes = 2 * schedule.vp_size * schedule.num_micro_batches
    factor = slowdown(spread, config.world_size, passes) if spread else 1.0
    weights = stage_weights(config.model, config.parallel)
    ring = _ring(config, machine)
    parts = [tuple(_parts(config, costs, weights, stage, ring, factor)) for stage in range(len(weights))]
    buckets = [
        bucket_uses(
            weights[rank :: schedule.pp_size], config.optimizer.reduce_bucket_size, costs.shares,
            is_tapered=is_tapered,
        )
        for rank in range(schedule.pp_size)
    ]  # fmt: skip
    stages = (
        Stage(own, buckets[stage % schedule.pp_size][stage // schedule.pp_size])
        for stage, own in enumerate(parts)
    )
    held = 1 if config.zero_stage is not ZeroStage.GRADIENTS else costs.shares
    return Step(
        schedule=schedule,
        stages=tuple(stages),
        zero_stage=config.zero_stage,
        reduce=_cost(costs.travel.reduce),
        across=_cost(costs.travel.across),
        gather=_cost(costs.travel.gather),
        update=Cost(0.0, costs.zero / held + (costs.norm + costs.update) / costs.shares),
        norm=_norm(config, machine),
        message=costs.message,
        contention=_contention(config, machine),
        host=_host(config, machine, costs),
    )


def _cost(collective: Collective) -> Cost:
    return Cost(collective.latency, collective.bytes_per_element * collective.seconds_per_byte)


def _norm(config: RunConfig, machine: Machine) -> float:
    """Of an all-reduce of one number among all ranks, by a tree."""
    latency = machine.network_latency if config.parallel.nnodes > 1 else machine.node_link_latency
    return 2 * math.ceil(math.log2(config.world_size)) * latency


def _contention(config: RunConfig, machine: Machine) -> float:
    """What compute takes longer while NCCL's kernels run; none where replicas exchange nothing."""
    processors = _PROCESSORS.get(machine.compute_capability[0])
    if not machine.is_gpu or processors is None or config.num_weight_copies == 1:
        return 1.0
    return processors / (processors - _CHANNELS)


def _host(config: RunConfig, machine: Machine, costs: StepCosts) -> Host | None:
    """States on the host; its updates before the norm, which overlap more, are left out."""
    fraction = offloaded_fraction(config, machine)
    if not fraction:
        return None
    shares = costs.shares
    return Host(
        fraction=fraction,
        down=Cost(0.0, costs.copy_down / shares),
        update=Cost(0.0, costs.host_update / shares),
        up=Cost(0.0, costs.copy_up / shares),
    )


def _ring(config: RunConfig, machine: Machine) -> tuple[int, float, float]:
    """Steps of the ring in one pass, and seconds of its messages: keys and values, and their gradients."""
    cp_size = config.parallel.context_parallel_size
    if cp_size == 1 or config.parallel.cp_comm_type == "a2a":
        return 0, 0.0, 0.0
    # Keys and values travel in forward and again in backward, with gradients in fp32.
    size, steps = element_bytes(config.training.precision), cp_size - 1
    sent = sent_bytes(config, "p2p") / steps / (2 * size + 4)
    seconds = [neighbour_seconds(machine, config, "cp", sent * each) for each in (size, 4)]
    return steps, seconds[0], seconds[1]


def _parts(
    config: RunConfig,
    costs: StepCosts,
    weights: list[Weights],
    stage: int,
    ring: tuple[int, float, float],
    factor: float,
) -> Iterator[Part]:
    """The parts of a stage, as `stage_weights` counts them.

    Recomputation is spread over all layers. Of a layer attention is a part; the rest is shared by the sizes
    of the matrices.
    """
    layers, is_last = config.stage_layers[stage], stage == len(weights) - 1
    forward, backward = costs.forward[stage], costs.backward[stage]
    if stage == 0:
        forward, backward = forward - costs.embedding[0], backward - costs.embedding[1]
        yield Part(costs.embedding[0] * factor, costs.embedding[1] * factor)
    forward -= costs.loss if is_last else 0.0
    steps, exchange, gradient_exchange = ring
    hidden = [costs.layer.forward, costs.layer.backward]
    # What nothing hides of the ring's messages is what the simulation is to find out.
    context = [each.context if steps else 0.0 for each in hidden]
    attention = [each.attention for each in hidden]
    own = weights[stage][stage == 0 :]
    numels = [sum(part) for part in own[: (len(own) - is_last) // layers]] if layers else []
    for _ in range(layers):
        rest = [forward / layers - attention[0] - context[0], backward / layers - attention[1] - context[1]]
        for numel in numels:
            if numel:
                share = numel / sum(numels)
                yield Part(rest[0] * share * factor, rest[1] * share * factor)
            else:
                yield Part(attention[0] * factor, attention[1] * factor, steps, exchange, gradient_exchange)
    if is_last:
        yield Part(costs.loss * factor, 0.0)
