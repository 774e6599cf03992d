"""Seconds of a step in closed form: compute, pipeline bubble, and exposed messages.

The sum of the parts is the step. Passes are those of the rank that computes longest; the pipeline's order is
simulated pass by pass. Reductions of gradients are in flight during the last micro-batch's backward, with
ZeRO-2 during each backward. The remainder is exposed, at least the embedding's gradient, which comes last.
New weights are gathered during the first forward, the embedding's first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from patch.config import RunConfig
from patch.config.choices import PRECISIONS, objective_traits
from patch.families.weights import EMBEDDING_PARAMETER, TIED_OUTPUT
from patch.features.optimizers import moment_bytes
from patch.layout.buckets import smallest_bucket
from patch.layout.pipeline_stages import stage_activations
from patch.plan import parameters
from patch.plan.activations import boundary_bytes
from patch.plan.fits import heaviest_rank
from patch.plan.flops import flops_per_step
from patch.plan.memory import bytes_per_rank, state_bytes, usable_device_memory, weights_on_host
from patch.plan.parameters import Amount, element_bytes
from patch.plan.pipeline import Schedule, Timing, simulate
from patch.plan.timing import communication as links
from patch.plan.timing.layer_time import LayerTimes, layer_times, product_seconds
from patch.plan.timing.machine import Machine
from patch.plan.timing.muon_time import muon_parts
from patch.text import timed

_LOGIT_BYTES = {True: 6, False: 20}
"""Bytes per logit. On a GPU, Triton kernels read it twice and write it once, in 16 bits, outside of products.
On a CPU it is written, read for maximum and sum, turned into a gradient, and read by two products."""

_SPECULATIVE_SHARE, _SHADOW_FACTOR = 0.5, 1.36
"""Backward hides the update of at most half of the host's states, and makes this update take 1.36 times as
long (patch/optimizer/states/host_buffers.py; toolkits/benchmarks/RESULTS.md)."""


class StepCosts:
    """Seconds of a step's components, each alone on its device or link; passes are of one micro-batch."""

    def __init__(self, config: RunConfig, machine: Machine) -> None:
        layers = parameters.by_layer(config, lambda run: layer_times(run, machine))
        self.config, self.machine, self.schedule = config, machine, Schedule.of(config)
        self.layers = [Counter(of_stage) for of_stage in layers]
        """Per stage in model order: the times of a layer -> number of such layers."""
        self.loss, self.embedding = _loss(config, machine), _embedding(config, machine)
        """Output layer and loss with their gradients, which the last stage's forward computes; forward and
        backward of the embedding, in the first stage."""
        self.forward, self.backward = map(list, zip(*(_stage(config, each) for each in layers), strict=True))
        """Per stage in model order, with recomputation and the exposed messages of TP and CP."""
        self.forward[0] += self.embedding[0]
        self.backward[0] += self.embedding[1]
        self.forward[-1] += self.loss
        units = parameters.freed_units(config) if config.gathers_weights_per_pass else [()] * len(layers)
        stages = zip(units, self.forward, self.backward, strict=True)
        self.waits = [_waits(config, machine, *stage) for stage in stages]
        """With ZeRO-3, further seconds in which passes wait for weights."""
        boundary = boundary_bytes(config)
        self.message = links.neighbour_seconds(machine, config, "pp", boundary) if len(layers) > 1 else 0.0
        """Between neighbouring stages, one way; 0 without stages."""
        self.data_parallel, self.of_experts = (
            links.data_parallel_messages(config, machine, of_experts=each) for each in (False, True)
        )
        """Collectives between replicas, and between ranks that have the same experts."""
        self.parameters = [stage.trained for stage in parameters.of_stages(config)]
        """Parameters that train on each pipeline rank."""
        trained, is_shared = parameters.parameters_of(config, None).trained, config.zero_stage.shards_states
        self.states = trained.kept(config, is_shared=is_shared)
        """Most elements whose states a rank updates."""
        self.update = _update_bytes(config) / machine.memory_rate
        """Per element that a rank updates on its device."""

    def of_rank(self, rank: int) -> tuple[float, float, list[PassWaits]]:
        """Return forward and backward of all stages of a pipeline rank, without waits, and their waits."""
        own = slice(rank, None, self.schedule.pp_size)
        return sum(self.forward[own]), sum(self.backward[own]), self.waits[own]

    @cached_property
    def timing(self) -> Timing:
        """The passes of the pipeline. Without interleaving a sender waits until its message has arrived."""
        is_hidden = self.schedule.vp_size > 1 and self.config.parallel.overlap_p2p_communication
        wait, last, waits = 0.0 if is_hidden else self.message, len(self.forward) - 1, self.waits
        forward = [n + waits[s].forward + (wait if s < last else 0) for s, n in enumerate(self.forward)]
        backward = [n + waits[s].backward + (wait if s else 0) for s, n in enumerate(self.backward)]
        return simulate(self.schedule, forward, backward, self.message if is_hidden else 0.0)


def _update_bytes(config: RunConfig) -> float:
    """Bytes that the update of a parameter reads and writes, moments in their dtypes."""
    return PRECISIONS[config.training.precision].update_bytes + 2 * moment_bytes(config.optimizer)


def _stage(config: RunConfig, layers: list[LayerTimes]) -> tuple[float, float]:
    """Forward and backward of a stage."""
    is_selective, split = config.recompute == "selective", stage_activations(len(layers), config.training)
    backward = _sum(layers, lambda layer: layer.backward.total + (layer.selective if is_selective else 0.0))
    backward += _sum(layers[split.computed_again], lambda layer: layer.forward.total)
    backward += _sum(layers[: split.offloaded], lambda layer: layer.offload)
    return _sum(layers, lambda layer: layer.forward.total), backward


def _sum(layers: Iterable[LayerTimes], seconds: Callable[[LayerTimes], float]) -> float:
    return sum(count * seconds(layer) for layer, count in Counter(layers).items())


def _loss(config: RunConfig, machine: Machine) -> float:
    """Products with the output layer's weight, in 16 bits at most, and the work on logits.
    There are three products, or two if the weight is frozen.
    """
    rows = config.padded_vocab_size // config.parallel.tensor_model_parallel_size
    precision, tokens = PRECISIONS[config.training.precision].kept_as, config.micro_batch_tokens
    sides, sums = (tokens, rows, config.model.hidden_size), links.tp_collective_seconds(config, machine)
    product = product_seconds(machine, precision, sides, element_bytes(precision))
    products = (2 + parameters.trained_share(config, TIED_OUTPUT)) * product
    return products + tokens * rows * _LOGIT_BYTES[machine.is_gpu] / machine.memory_rate + 2 * sums


def _embedding(config: RunConfig, machine: Machine) -> tuple[float, float]:
    """Forward reads and writes rows. Backward zeroes the main gradient once and adds rows to it, or without
    fusion computes the whole weight's gradient and accumulates it. A frozen weight has no backward.
    """
    rows = config.padded_vocab_size // config.parallel.tensor_model_parallel_size
    boundary, sums = boundary_bytes(config), links.tp_collective_seconds(config, machine)
    size, main = map(element_bytes, (config.training.precision, config.optimizer.main_grads_dtype))
    forward = 2 * boundary / machine.memory_rate + sums
    if not parameters.trained_share(config, EMBEDDING_PARAMETER):
        return forward, 0.0
    traffic, weight = 2.0 * boundary, rows * config.model.hidden_size
    if config.optimizer.fuses_gradients(cuda=machine.is_gpu):
        zeroed = config.reductions_per_step / config.num_micro_batches
        traffic += 2 * boundary * main / size + weight * main * zeroed
    else:
        traffic += 2 * weight * (size + main)
    return forward, traffic / machine.memory_rate + sums / 2


class StepPart(NamedTuple):
    """A part of a step."""

    name: str
    seconds: float
    formula: str = ""
    """Formula with its numbers; "" for messages."""


class StepTime(NamedTuple):
    """A planned step."""

    parts: list[StepPart]
    seconds: float
    tokens_per_second: float
    model_flops: float
    """FLOP/s of a device, without recomputation."""
    mfu: float | None
    """None for a CPU, whose peak is unknown."""
    computing: float
    """Computing seconds of the rank that computes longest."""
    idle: float
    """Bubble: idle time of all ranks over their computing time."""


def step_time(config: RunConfig, machine: Machine) -> StepTime:
    """Return the planned time of a step."""
    costs = StepCosts(config, machine)
    parts, timing = list(_passes(costs)), costs.timing
    if objective_traits(config.training.objective).begins_with_forward:
        parts.insert(0, _reference_point(costs))
    if costs.schedule.pp_size > 1:
        formula = f"the order of passes, simulated; equal stages idle {costs.schedule.formula:.1%}"
        idle = timing.step - sum(part.seconds for part in parts if part.name != _POINT)
        parts.append(StepPart("pipeline bubble and messages", idle, formula))
    parts += _after_last_backward(costs)
    seconds = sum(part.seconds for part in parts)
    tokens = config.training.global_batch_size * config.sample_length
    flops = flops_per_step(config).model / seconds / config.world_size
    mfu = flops / machine.peak_flops(config.training.precision) if machine.is_gpu else None
    return StepTime(parts, seconds, tokens / seconds, flops, mfu, max(timing.computing), timing.bubble)


_POINT = "KTO's reference point"


def _reference_point(costs: StepCosts) -> StepPart:
    """The forward of all mismatched answers before a step of KTO, without gradients of the output layer."""
    pp_size, count = costs.schedule.pp_size, costs.config.num_micro_batches
    forward = [*costs.forward[:-1], costs.forward[-1] - costs.loss * 2 / 3]
    longest = max(sum(forward[rank::pp_size]) for rank in range(pp_size))
    text = f"({count} micro-batches + {pp_size} - 1) x {timed(longest)}: a forward of mismatched answers"
    return StepPart(_POINT, (count + pp_size - 1) * longest, text)


_PARTS = {
    "products with weights": "products", "attention": "attention", "norms, RoPE, SwiGLU": "memory",
    "TP messages, exposed": "tensor", "CP messages, exposed": "context",
    "messages to experts and back": "experts",
}  # fmt: skip
"""Part of a step that is a sum over layers -> field of `LayerTime`."""


def _passes(costs: StepCosts) -> Iterator[StepPart]:
    config, computing = costs.config, costs.timing.computing
    count, rank = config.num_micro_batches, computing.index(max(computing))
    own = range(rank, len(costs.forward), costs.schedule.pp_size)
    kinds = sum((costs.layers[stage] for stage in own), Counter[LayerTimes]())
    for title, name in _PARTS.items():
        both = [(n, getattr(each.forward, name), getattr(each.backward, name)) for each, n in kinds.items()]
        texts = [f"{n} layers x ({timed(first)} + {timed(second)} backward)" for n, first, second in both]
        seconds = count * sum(n * (first + second) for n, first, second in both)
        yield StepPart(title, seconds, f"{count} micro-batches x {', and '.join(texts)}")
    waiting = sum(n * (each.forward.waiting + each.backward.waiting) for each, n in kinds.items())
    yield StepPart("waiting for the host", count * waiting, "kernels run faster than the host starts them")
    again = costs.of_rank(rank)[1] - sum(n * each.backward.total for each, n in kinds.items())
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
    if config.gathers_weights_per_pass:
        exposed = sum(wait.forward + wait.backward for wait in costs.of_rank(rank)[2])
        yield StepPart("weights of each pass, exposed", count * exposed)


def _after_last_backward(costs: StepCosts) -> Iterator[StepPart]:
    """The parts after the last backward: gradients, norm, update, weights."""
    config, machine, own = costs.config, costs.machine, costs.states
    if config.num_weight_copies > 1:
        yield StepPart("gradients, exposed", _reduction(costs))
        if not config.gathers_weights_per_pass:  # else the passes gather them
            yield StepPart("weights, exposed", _gathering(costs))
    fraction = offloaded_fraction(config, machine)
    read = element_bytes(config.optimizer.main_grads_dtype) / machine.memory_rate  # of a gradient
    hops = 2 * math.ceil(math.log2(max(config.world_size, 1)))
    latency = hops * (machine.network_latency if config.parallel.nnodes > 1 else machine.node_link_latency)
    update = own * costs.update * (1 - fraction)
    text = f"{own / 1e6:.0f} M states a rank: norm {timed(own * read + latency)}, Adam {timed(update)}"
    yield StepPart("norm and update", own * read + update + latency, text)
    for part in muon_parts(config, machine):
        yield StepPart(*part)
    if fraction:
        yield StepPart("states on the host, exposed", _host_update(costs, own * fraction))


class ReplicaMessages(NamedTuple):
    """Messages between one pipeline rank and its replicas."""

    seconds: float
    """All buckets."""
    unhidden: float
    """Seconds that no pass hides. On the first stage it is the embedding, whose gradient comes last and whose
    weight is needed first; on other stages a small bucket."""

    def exposed(self, window: float, again: float = 0.0, times: int = 1) -> float:
        """Return the exposed seconds of a step with `times` exchanges of buckets.

        `window` seconds of compute hide the last exchange, `again` seconds hide each earlier exchange.
        """
        return max(self.unhidden, self.seconds - window) + (times - 1) * max(0.0, self.seconds - again)

    def slowed(self, contention: float, times: int = 1) -> float:
        """Return the seconds by which messages in flight slow down compute."""
        return contention * times * (self.seconds - self.unhidden)


def _replica_messages(
    costs: StepCosts, what: Literal["reduce", "gather"], times: int = 1
) -> tuple[list[ReplicaMessages], float]:
    """Messages of each pipeline rank, and the seconds by which they slow down compute if sent `times` times.
    Experts have their own data-parallel ranks.
    """
    config, size = costs.config, costs.config.optimizer.reduce_bucket_size
    collective, of_experts = (getattr(way, what) for way in (costs.data_parallel, costs.of_experts))
    smallest = smallest_bucket(size, config.state_group_size)
    tp_size = config.parallel.tensor_model_parallel_size
    embedding = config.padded_vocab_size * config.model.hidden_size / tp_size
    found = []
    for rank, (elements, experts) in enumerate(costs.parameters):
        # Whole buckets, and those that halve towards the end of backward.
        buckets = math.ceil(elements / size) + round(math.log2(max(size / smallest, 1)))
        seconds = collective.seconds(elements) + (buckets - 1) * collective.latency
        if experts:
            seconds += of_experts.seconds(experts) + math.ceil(experts / size) * of_experts.latency
        unhidden = collective.seconds(min(smallest if rank else embedding, elements))
        found.append(ReplicaMessages(seconds, unhidden))
    most = ReplicaMessages(max(found).seconds, found[0].unhidden)
    return found, most.slowed(costs.machine.reached.contention, times)


def _reduction(costs: StepCosts) -> float:
    """Exposed seconds of gradient reductions after the last backward."""
    timing, times = costs.timing, costs.config.reductions_per_step
    latest, (by_rank, slower) = timing.step, _replica_messages(costs, "reduce", times)
    for rank, sent in enumerate(by_rank):
        forward, backward, waits = costs.of_rank(rank)  # gathers of weights take the links, too
        backward += sum(each.backward - each.gather for each in waits)
        forward += sum(each.forward - each.gather for each in waits)
        latest = max(latest, timing.ends[rank] + sent.exposed(backward, backward + forward, times))
    across = costs.data_parallel.across.seconds(max(each.total for each in costs.parameters))
    return latest - timing.step + across + slower


def _gathering(costs: StepCosts) -> float:
    """Seconds in which the first forward waits for weights. Later stages begin their forward later."""
    worst, later, (by_rank, slower) = 0.0, 0.0, _replica_messages(costs, "gather")
    for rank, sent in enumerate(by_rank):
        worst = max(worst, sent.exposed(costs.of_rank(rank)[0]) - later)
        later += costs.forward[rank] + costs.message
    return worst + slower


def offloaded_fraction(config: RunConfig, machine: Machine) -> float:
    """Return the share of a rank's optimizer states on the host; with `auto`, what the device cannot hold."""
    policy = config.optimizer.optimizer_offload_policy
    if policy == "static":
        return config.optimizer.optimizer_offload_fraction
    if policy is None or not machine.is_gpu:
        return 0.0
    states = bytes_per_rank(config).optimizer
    room = usable_device_memory(config, machine.facts) - heaviest_rank(config, cuda=True).total
    return min(1.0, max(0.0, 1 - room / states))


def _host_update(costs: StepCosts, elements: float) -> float:
    """Seconds that a step waits for states on the host.

    Gradients are copied to the host behind the last backward, during which at most half of the states are
    updated. The host keeps its own copy of the weights, except those whose states are on a disk. The other
    states are updated after the norm, during the next forward, which needs its first weights at once.
    Weights on the host need no copies: their gradients are already there, and their new values stay there.
    Streamed states are updated by the device after the norm.
    """
    config, machine = costs.config, costs.machine
    main, weight = (element_bytes(p) for p in (config.optimizer.main_grads_dtype, config.training.precision))
    link = machine.host_link_bandwidth * machine.reached.host_link
    copied = max(0.0, elements - costs.states * weights_on_host(config))
    # The states of streamed chunks are copied both ways. A measured share (`auto`) is planned as 0.
    streamed = copied * (config.optimizer.optimizer_offload_streamed or 0)
    copied, elements = copied - streamed, elements - streamed
    up = (copied * weight + streamed * state_bytes(config)) / link
    update = elements * _update_bytes(config) / host_rate(config, machine)
    processes = config.parallel.nproc_per_node
    stays = config.optimizer.host_state_bytes(machine.host_memory_bytes // processes)
    on_disk = max(0.0, elements * state_bytes(config) - stays)  # read and written beside the kernel
    down = (copied * main + on_disk / state_bytes(config) * weight) / link
    update = max(update, 2 * on_disk * processes / (machine.disk_bandwidth * machine.reached.disk))
    forward, backward, _ = costs.of_rank(0)
    early = min(_SPECULATIVE_SHARE, backward / max(update * _SHADOW_FACTOR, 1e-9))
    return max(0.0, down - backward) + max(0.0, max(update * (1 - early), up) - forward)


class PassWaits(NamedTuple):
    """Seconds in which the passes of one stage and micro-batch wait for weights."""

    forward: float = 0.0
    backward: float = 0.0
    gather: float = 0.0
    """Seconds of all-gathers, in each of both passes."""


def host_rate(config: RunConfig, machine: Machine) -> float:
    """Return the bytes/s of host memory for each process of a node."""
    return machine.host_bandwidth * machine.reached.host_bandwidth / config.parallel.nproc_per_node


def _waits(
    config: RunConfig, machine: Machine, units: Sequence[Amount], forward: float, backward: float
) -> PassWaits:
    """The waits of a stage; `units` are in the order of forward, the seconds are without waits."""
    if not units:
        return PassWaits()
    instances = config.parallel.num_distributed_optimizer_instances
    between = links.ring(machine, links.group_of(config, "dp", "cp", instances=instances), 1)
    of_experts = links.ring(machine, links.group_of(config, "dp", of_experts=True), 1)
    link, memory = machine.host_link_bandwidth * machine.reached.host_link, host_rate(config, machine)
    main, weight = (element_bytes(p) for p in (config.optimizer.main_grads_dtype, config.training.precision))
    # Gradients on the host are accumulated there: two are read, one is written.
    touches = 1 if config.num_micro_batches == 1 else 4

    def gather(unit: Amount) -> float:
        return between.seconds(unit.others) + (of_experts.seconds(unit.experts) if unit.experts else 0.0)

    def down(unit: Amount, gradients: float = 0.0) -> float:
        """Copy a rank's part from the host, with `gradients` bytes per byte in the other direction."""
        part = unit.others / config.state_group_size + unit.experts / config.num_expert_copies
        part *= weights_on_host(config)
        return part * max(1 / link, gradients / link, (1 + gradients * touches) / memory)

    gathers, slower = sum(map(gather, units)), machine.reached.contention * sum(map(gather, units))
    copies = sum(map(down, units)), sum(down(unit, main / weight) for unit in units)
    first, last = (gather(unit) + down(unit) for unit in (units[0], units[-1]))
    forward = max(first, max(gathers, copies[0]) - forward) + slower
    backward = max(last, max(gathers, copies[1]) - backward) + slower
    return PassWaits(forward, backward, gathers)
