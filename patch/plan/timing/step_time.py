"""Seconds of a step in closed form: what computes, the pipeline's idle time, and messages that nothing hides.

The parts add up to the step. Passes are those of the process that computes longest; the pipeline's order is
simulated pass by pass. Gradients travel while the last micro-batch's backward runs, with ZeRO-2 in each; what
is left is exposed, and at least the embedding's gradient, which comes last. New weights travel while the
first forward runs; the embedding's come first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import PRECISIONS
from patch.layout.buckets import smallest_bucket
from patch.layout.pipeline_stages import stage_activations
from patch.numbers import timed
from patch.plan.activations import boundary_bytes
from patch.plan.fits import heaviest_rank
from patch.plan.flops import flops_per_step
from patch.plan.memory import bytes_per_rank, state_bytes, usable_device_memory, weights_on_host
from patch.plan.parameters import Unit, by_layer, element_bytes, freed_units, kept_parts, parameters_of
from patch.plan.pipeline import Schedule, Timing, simulate
from patch.plan.timing import communication as links
from patch.plan.timing.layer_time import LayerTimes, layer_times, product_seconds
from patch.plan.timing.machine import Machine

_LOGIT_BYTES = 20
"""For each logit: written, read for its largest and their sum, made a gradient, read by two products."""

_SPECULATIVE_SHARE, _SHADOW_FACTOR = 0.5, 1.36
"""At most half of the host's states is updated while backward runs, which takes 1.36 times as long
(patch/optimizer/host_buffers.py; toolkits/benchmarks/RESULTS.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCosts:
    """Seconds of what a step consists of, each alone on its device or link; passes are of one micro-batch."""

    layers: tuple[Counter[LayerTimes], ...]
    """Seconds of one layer, in parts, and how many such layers a stage has, in the order of the model."""
    loss: float
    """Output layer and loss with their gradients, which the last stage's forward computes."""
    embedding: tuple[float, float]
    """Forward and backward, in the first stage."""
    forward: tuple[float, ...]
    """Forward of each stage, in the order of the model; with recomputation and what nothing hides of TP and
    CP."""
    backward: tuple[float, ...]
    waits: tuple[PassWaits, ...]
    """Seconds that passes wait for weights beside that, if replicas shard them."""
    message: float
    """Between neighbouring stages, one way; 0 without stages."""
    travel: links.GradientTravel
    """Collectives of buckets of gradients and weights between replicas."""
    of_experts: links.GradientTravel
    """Messages between ranks that have the same experts."""
    parameters: tuple[int, ...]
    """Elements that each pipeline rank trains."""
    experts: tuple[int, ...]
    """The group of experts."""
    states: int
    """Elements whose states a rank updates, at most."""
    update: float
    """For each element that a rank updates on its device."""


def step_costs(config: RunConfig, machine: Machine) -> StepCosts:
    """The seconds of what a run's step consists of."""
    layers = by_layer(config, lambda run: layer_times(run, machine))
    loss, embedding = _loss(config, machine), _embedding(config, machine)
    forward, backward = _stages(config, layers)
    forward[0], backward[0] = forward[0] + embedding[0], backward[0] + embedding[1]
    forward[-1] += loss
    stages, parallel = len(forward), config.parallel
    ranks = range(parallel.pipeline_model_parallel_size)
    message = links.neighbour_seconds(machine, config, "pp", boundary_bytes(config)) if stages > 1 else 0.0
    return StepCosts(
        layers=tuple(map(Counter, layers)),
        loss=loss,
        embedding=embedding,
        forward=tuple(forward),
        backward=tuple(backward),
        waits=pass_waits(config, machine, forward, backward),
        message=message,
        travel=links.gradient_travel(config, machine, of_experts=False),
        of_experts=links.gradient_travel(config, machine, of_experts=True),
        parameters=tuple(parameters_of(config, rank) for rank in ranks),
        experts=tuple(parameters_of(config, rank, of_experts=True) for rank in ranks),
        states=kept_parts(config, None, is_shared=config.zero_stage.shares_states),
        update=_update_bytes(config) / machine.memory_rate,
    )


def _update_bytes(config: RunConfig) -> float:
    """Bytes that the update of a parameter reads and writes, its moments in their types."""
    return PRECISIONS[config.training.precision].update_bytes - 2 * config.optimizer.saved_moment_bytes


def _stages(config: RunConfig, stages: list[list[LayerTimes]]) -> tuple[list[float], list[float]]:
    """Forward and backward of each stage's layers."""
    forward, backward = [], []
    is_selective = config.recompute == "selective"
    for layers in stages:
        split = stage_activations(len(layers), config.training)
        forward.append(_sum(layers, lambda layer: layer.forward.total))
        backward.append(
            _sum(layers, lambda layer: layer.backward.total + (layer.selective if is_selective else 0.0))
            + _sum(layers[split.computed_again], lambda layer: layer.forward.total)
            + _sum(layers[: split.offloaded], lambda layer: layer.offload)
        )
    return forward, backward


def _sum(layers: Iterable[LayerTimes], seconds: Callable[[LayerTimes], float]) -> float:
    return sum(count * seconds(layer) for layer, count in Counter(layers).items())


def _loss(config: RunConfig, machine: Machine) -> float:
    """Products with the output layer's weight, in 16 bits at most, and the work on logits.

    They are three; two where it stays as it is, beside adapters.
    """
    model, training = config.model, config.training
    rows = config.padded_vocab_size // config.parallel.tensor_model_parallel_size
    tokens = config.micro_batch_tokens
    precision, sides = PRECISIONS[training.precision].kept_as, (tokens, rows, model.hidden_size)
    products = (2 if config.adapter.lora_rank else 3) * product_seconds(
        machine, precision, sides, element_bytes(precision)
    )
    bandwidth = machine.memory_rate
    return products + tokens * rows * _LOGIT_BYTES / bandwidth + 2 * links.summing_seconds(config, machine)


def _embedding(config: RunConfig, machine: Machine) -> tuple[float, float]:
    """Forward reads and writes rows; backward makes a gradient of the whole weight, and adds it up.

    Beside adapters it has no backward.
    """
    size, parallel = element_bytes(config.training.precision), config.parallel
    rows = config.padded_vocab_size // parallel.tensor_model_parallel_size
    bandwidth = machine.memory_rate
    boundary = boundary_bytes(config)
    added = 2 * size + 2 * element_bytes(config.optimizer.main_grads_dtype)
    weight = rows * config.model.hidden_size * added
    forward = 2 * boundary / bandwidth + links.summing_seconds(config, machine)
    if config.adapter.lora_rank:
        return forward, 0.0
    return forward, (weight + 2 * boundary) / bandwidth + links.summing_seconds(config, machine) / 2


class StepPart(NamedTuple):
    """A part of a step."""

    name: str
    seconds: float
    formula: str = ""
    """How it was computed, with its numbers; "" for messages."""


class StepTime(NamedTuple):
    """A planned step."""

    parts: list[StepPart]
    seconds: float
    """Their sum."""
    tokens_per_second: float
    """Rate of all devices."""
    model_flops: float
    """FLOP/s of a device, without recomputation."""
    mfu: float | None
    """None for a CPU, whose peak is not known."""
    computing: float
    """Seconds of the step in which the process that computes longest does."""
    idle: float
    """Time that all processes wait for the pipeline, over their computing time."""


def step_time(config: RunConfig, machine: Machine) -> StepTime:
    """The planned time of a step."""
    costs = step_costs(config, machine)
    timing = _timing(config, costs)
    parts = list(_passes(config, costs, timing))
    if config.parallel.pipeline_model_parallel_size > 1:
        formula = f"the order of passes, simulated; equal stages idle {Schedule.of(config).formula:.1%}"
        idle = timing.step - sum(part.seconds for part in parts)
        parts.append(StepPart("pipeline bubble and messages", idle, formula))
    parts += _around(config, machine, costs, timing)
    seconds = sum(part.seconds for part in parts)
    tokens = config.training.global_batch_size * config.sample_length
    flops = flops_per_step(config).model / seconds / config.world_size
    mfu = flops / machine.peak_flops(config.training.precision) if machine.is_gpu else None
    return StepTime(parts, seconds, tokens / seconds, flops, mfu, max(timing.computing), timing.bubble)


def _timing(config: RunConfig, costs: StepCosts) -> Timing:
    """The passes of the pipeline. Without interleaving a sender waits until its message has arrived."""
    is_hidden = config.virtual_pipeline_size > 1 and config.parallel.overlap_p2p_communication
    wait, last, waits = 0.0 if is_hidden else costs.message, len(costs.forward) - 1, costs.waits
    forward = [n + waits[s].forward + (wait if s < last else 0) for s, n in enumerate(costs.forward)]
    backward = [n + waits[s].backward + (wait if s else 0) for s, n in enumerate(costs.backward)]
    return simulate(Schedule.of(config), forward, backward, costs.message if is_hidden else 0.0)


_PARTS = {
    "products with weights": "products", "attention": "attention", "norms, RoPE, SwiGLU": "memory",
    "TP messages, exposed": "tensor", "CP messages, exposed": "context",
    "messages to experts and back": "experts",
}  # fmt: skip
"""Parts of a step that are sums over layers, by their field of `LayerTime`."""


def _passes(config: RunConfig, costs: StepCosts, timing: Timing) -> Iterator[StepPart]:
    """The parts of all passes of the process that computes longest, and the time that it waits for others."""
    pp_size, count = config.parallel.pipeline_model_parallel_size, config.num_micro_batches
    rank = timing.computing.index(max(timing.computing))
    own = range(rank, len(costs.forward), pp_size)
    kinds = sum((costs.layers[stage] for stage in own), Counter[LayerTimes]())
    for title, name in _PARTS.items():
        both = [(n, getattr(each.forward, name), getattr(each.backward, name)) for each, n in kinds.items()]
        texts = [f"{n} layers x ({timed(first)} + {timed(second)} backward)" for n, first, second in both]
        seconds = count * sum(n * (first + second) for n, first, second in both)
        yield StepPart(title, seconds, f"{count} micro-batches x {', and '.join(texts)}")
    waiting = sum(n * (each.forward.waiting + each.backward.waiting) for each, n in kinds.items())
    yield StepPart("waiting for the host", count * waiting, "kernels run faster than the host starts them")
    again = sum(costs.backward[stage] for stage in own) - sum(n * e.backward.total for e, n in kinds.items())
    again -= costs.embedding[1] if 0 in own else 0.0
    text = f"{count} x {timed(again)}: forwards and activations that AC computes or copies again"
    yield StepPart("recomputation, offload of activations", count * max(0.0, again), text)
    if 0 in own:
        first, second = costs.embedding
        text = f"{count} x ({timed(first)} + {timed(second)} backward)"
        yield StepPart("embedding", count * sum(costs.embedding), text)
    if len(costs.forward) - 1 in own:
        text = f"{count} x {timed(costs.loss)}: products with {config.padded_vocab_size} rows, logits"
        yield StepPart("output layer and loss", count * costs.loss, text)
    if config.frees_weights:
        exposed = sum(costs.waits[stage].forward + costs.waits[stage].backward for stage in own)
        yield StepPart("weights of each pass, exposed", count * exposed)


def _around(config: RunConfig, machine: Machine, costs: StepCosts, timing: Timing) -> Iterator[StepPart]:
    """The parts after the last backward: gradients, norm, update, weights."""
    if config.num_weight_copies > 1:
        contention = machine.reached.contention
        yield StepPart("gradients, exposed", _reduction(config, costs, timing, contention))
        if not config.frees_weights:  # else the passes gather them
            yield StepPart("weights, exposed", _gathering(config, costs, contention))
    fraction, own = offloaded_fraction(config, machine), costs.states
    held = kept_parts(config, None, is_shared=config.zero_stage.shares_gradients)
    read = element_bytes(config.optimizer.main_grads_dtype) / machine.memory_rate  # of a gradient
    hops = 2 * math.ceil(math.log2(max(config.world_size, 1)))
    latency = hops * (machine.network_latency if config.parallel.nnodes > 1 else machine.node_link_latency)
    update = own * costs.update * (1 - fraction)
    text = (
        f"{own / 1e6:.0f} M states a rank: norm {timed(own * read + latency)}, Adam {timed(update)}; "
        f"{held / 1e6:.0f} M gradients cleared"
    )
    yield StepPart("norm and update", own * read + update + held * read + latency, text)
    if fraction:
        yield StepPart("states on the host, exposed", _host_update(config, machine, costs, own * fraction))


class Travel(NamedTuple):
    """The messages between one pipeline rank and its replicas."""

    seconds: float
    """Seconds of all buckets."""
    unhidden: float
    """Seconds of those that no pass hides: the embedding's, which is the last to have its gradient and the
    first that is needed; of other stages a small bucket."""

    def exposed(self, window: float, again: float = 0.0, times: int = 1) -> float:
        """Seconds of a step that nothing hides.

        Args:
            window: of compute beside the last time that the buckets travel.
            again: the same of each time before.
            times: how often a step sends them.
        """
        return max(self.unhidden, self.seconds - window) + (times - 1) * max(0.0, self.seconds - again)

    def slowed(self, contention: float, times: int = 1) -> float:
        """Seconds by which compute takes longer because messages travel beside it."""
        return contention * times * (self.seconds - self.unhidden)


def _travels(
    config: RunConfig, costs: StepCosts, collective: links.Collective, of_experts: links.Collective
) -> list[Travel]:
    """Travel of each pipeline rank; experts travel between other ranks."""
    size = config.optimizer.reduce_bucket_size
    smallest = smallest_bucket(size, config.num_state_shares)
    tp_size = config.parallel.tensor_model_parallel_size
    embedding = config.padded_vocab_size * config.model.hidden_size / tp_size
    found = []
    for rank, (total, experts) in enumerate(zip(costs.parameters, costs.experts, strict=True)):
        elements = total - experts
        # Whole buckets, and those that halve towards the end of backward.
        buckets = math.ceil(elements / size) + round(math.log2(max(size / smallest, 1)))
        seconds = collective.seconds(elements) + (buckets - 1) * collective.latency
        if experts:
            seconds += of_experts.seconds(experts) + math.ceil(experts / size) * of_experts.latency
        unhidden = collective.seconds(min(smallest if rank else embedding, elements))
        found.append(Travel(seconds, unhidden))
    return found


def _reduction(config: RunConfig, costs: StepCosts, timing: Timing, contention: float) -> float:
    """Seconds of gradients that are in flight when the last process ends its last backward."""
    pp_size, times = config.parallel.pipeline_model_parallel_size, config.reductions_per_step
    travels = _travels(config, costs, costs.travel.reduce, costs.of_experts.reduce)
    latest = timing.step
    for rank, travel in enumerate(travels):
        waits = costs.waits[rank::pp_size]  # gathers of weights take the links, too
        backward = sum(costs.backward[rank::pp_size]) + sum(each.backward - each.gather for each in waits)
        forward = sum(costs.forward[rank::pp_size]) + sum(each.forward - each.gather for each in waits)
        latest = max(latest, timing.ends[rank] + travel.exposed(backward, backward + forward, times))
    across = costs.travel.across.seconds(max(costs.parameters))
    slower = Travel(max(travels).seconds, travels[0].unhidden).slowed(contention, times)
    return latest - timing.step + across + slower


def _gathering(config: RunConfig, costs: StepCosts, contention: float) -> float:
    """Seconds of weights that the first forward waits for. A later stage's forward begins later."""
    pp_size = config.parallel.pipeline_model_parallel_size
    travels = _travels(config, costs, costs.travel.gather, costs.of_experts.gather)
    worst, later = 0.0, 0.0
    for rank, travel in enumerate(travels):
        worst = max(worst, travel.exposed(sum(costs.forward[rank::pp_size])) - later)
        later += costs.forward[rank] + costs.message
    return worst + Travel(max(travels).seconds, travels[0].unhidden).slowed(contention)


def offloaded_fraction(config: RunConfig, machine: Machine) -> float:
    """The share of a rank's optimizer states in host memory; with `auto` what the device has no room for."""
    policy = config.optimizer.optimizer_offload_policy
    if policy == "static":
        return config.optimizer.optimizer_offload_fraction
    if policy is None or not machine.is_gpu:
        return 0.0
    states = bytes_per_rank(config).optimizer
    room = usable_device_memory(config, machine.facts) - heaviest_rank(config, cuda=True).total
    return min(1.0, max(0.0, 1 - room / states))


def _host_update(config: RunConfig, machine: Machine, costs: StepCosts, elements: float) -> float:
    """Seconds that a step waits for states on the host.

    Gradients go down behind the last backward. So many states are updated meanwhile as there is time for, at
    most half; the others after the norm, while the next forward runs, which needs its first weights at once.
    Of weights on the host the gradients are there already, and the new ones stay.
    """
    main, weight = (element_bytes(p) for p in (config.optimizer.main_grads_dtype, config.training.precision))
    link = machine.host_link_bandwidth * machine.reached.host_link
    copied = max(0.0, elements - costs.states * weights_on_host(config))
    down, up = copied * (main + weight) / link, copied * weight / link
    update = elements * _update_bytes(config) / host_rate(config, machine)
    processes = config.parallel.nproc_per_node
    stays = config.optimizer.host_state_bytes(machine.host_memory_bytes // processes)
    on_disk = max(0.0, elements * state_bytes(config) - stays)  # read and written beside the kernel
    update = max(update, 2 * on_disk * processes / (machine.disk_bandwidth * machine.reached.disk))
    pp_size = config.parallel.pipeline_model_parallel_size
    backward, forward = sum(costs.backward[::pp_size]), sum(costs.forward[::pp_size])
    early = min(_SPECULATIVE_SHARE, backward / (update * _SHADOW_FACTOR))
    return max(0.0, down - backward) + max(0.0, max(update * (1 - early), up) - forward)


class PassWaits(NamedTuple):
    """Seconds that the passes of one stage and micro-batch wait for weights."""

    forward: float = 0.0
    backward: float = 0.0
    gather: float = 0.0
    """Seconds of messages of weights between ranks, in each of both passes."""


def pass_waits(
    config: RunConfig, machine: Machine, forward: Sequence[float], backward: Sequence[float]
) -> tuple[PassWaits, ...]:
    """The waits of each stage for its weights.

    Args:
        config: the run.
        machine: its devices and links.
        forward, backward: seconds of each stage's passes without waits.
    """
    if not config.frees_weights:
        return (PassWaits(),) * len(forward)
    stages = zip(freed_units(config), zip(forward, backward, strict=True), strict=True)
    return tuple(_waits(config, machine, units, own) for units, own in stages)


def host_rate(config: RunConfig, machine: Machine) -> float:
    """Bytes/s of host memory that each process of a node has."""
    return machine.host_bandwidth * machine.reached.host_bandwidth / config.parallel.nproc_per_node


def _waits(config: RunConfig, machine: Machine, units: Sequence[Unit], own: Sequence[float]) -> PassWaits:
    """The waits of a stage.

    Args:
        config, machine: see `pass_waits`.
        units: its weights, in the order of forward.
        own: seconds of its forward and its backward.
    """
    instances = config.parallel.num_distributed_optimizer_instances
    between = links.ring(machine, links.group_of(config, "dp", "cp", instances=instances), 1)
    of_experts = links.ring(machine, links.group_of(config, "dp", of_experts=True), 1)
    link, memory = machine.host_link_bandwidth * machine.reached.host_link, host_rate(config, machine)
    main, weight = (element_bytes(p) for p in (config.optimizer.main_grads_dtype, config.training.precision))
    # Gradients on the host are added up there: two are read, one is written.
    touches = 1 if config.num_micro_batches == 1 else 4

    def gather(unit: Unit) -> float:
        return between.seconds(unit.others) + (of_experts.seconds(unit.experts) if unit.experts else 0.0)

    def down(unit: Unit, gradients: float = 0.0) -> float:
        """Copy a rank's part from the host, beside this many bytes of gradients for each byte to it."""
        part = unit.others / config.num_state_shares + unit.experts / config.num_expert_copies
        part *= weights_on_host(config)
        return part * max(1 / link, gradients / link, (1 + gradients * touches) / memory)

    gathers, slower = sum(map(gather, units)), machine.reached.contention * sum(map(gather, units))
    copies = sum(map(down, units)), sum(down(unit, main / weight) for unit in units)
    first, last = (gather(unit) + down(unit) for unit in (units[0], units[-1]))
    forward, backward = (
        max(alone, max(gathers, copy) - seconds) + slower
        for alone, copy, seconds in zip((first, last), copies, own, strict=True)
    )
    return PassWaits(forward, backward, gathers)
