"""The search of layouts: the fastest ways to train a model on a machine that fit its memory.

All sizes of TP, PP, VPP, CP, EP and micro-batches that the rules allow are looked at. Of each the cheapest
way that fits is taken, of what the rows of `SAVINGS` have for a search: what is sharded, what is recomputed,
which share of the states is on the host. Those that could be the fastest are timed by `step_time`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from patch.config import RunConfig
from patch.plan import savings
from patch.plan.fits import Fit, Found, Space, Way, best
from patch.plan.memory import state_on_device, usable_device_memory
from patch.plan.pipeline import Schedule
from patch.plan.resolve import resolve_if_legal
from patch.plan.timing.machine import Machine
from patch.plan.timing.step_time import StepTime, step_costs, step_time

MICRO_BATCHES = (1, 2, 4, 8)
_NUM_TIMED = 48
_FAR = 1.2
"""A layout that takes so many times as long as another, even if it saves no memory, is not looked at."""


class Layout(NamedTuple):
    """The sizes of a layout."""

    tp: int
    pp: int
    vpp: int
    cp: int
    micro_batch: int
    ep: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Layout:
        """The sizes of a run."""
        parallel, experts = config.parallel, config.experts
        return cls(
            parallel.tensor_model_parallel_size,
            parallel.pipeline_model_parallel_size,
            config.virtual_pipeline_size,
            parallel.context_parallel_size,
            config.training.micro_batch_size,
            experts.expert_model_parallel_size,
        )


class Candidate(NamedTuple):
    """A layout that fits."""

    layout: Layout
    run: RunConfig
    """The run with it; what is left to `auto` is still so."""
    resolved: RunConfig
    fit: Fit
    time: StepTime


def search(config: RunConfig, machine: Machine, num_best: int = 5) -> list[Candidate]:
    """The fastest layouts, the best of each TP, PP and CP, fastest first; [] if nothing fits.

    Args:
        config: the run; its layout, micro-batch, recomputation, sharding and offload are replaced.
        machine: all nodes of it are used.
        num_best: at most so many.
    """
    seen: list[Found] = []
    space = _space(config, machine, _ways(config, machine, seen))
    fitting = [each for each in best(config, machine.facts, space, seen) if each.fit.is_whole][:_NUM_TIMED]
    sizes = [Layout.of(each.run) for each in fitting]
    found: dict[tuple[int, int, int], Candidate] = {}
    for layout, (_, run, resolved, fit, bound) in zip(sizes, fitting, strict=True):
        worst = sorted(each.time.seconds for each in found.values())[:num_best]
        if len(worst) == num_best and bound > worst[-1]:
            break
        one = Candidate(layout, run, resolved, fit, step_time(resolved, machine))
        key = layout.tp, layout.pp, layout.cp
        if key not in found or one.time.seconds < found[key].time.seconds:
            found[key] = one
    return sorted(found.values(), key=lambda one: one.time.seconds)[:num_best]


def _space(config: RunConfig, machine: Machine, ways: Iterable[Way]) -> Space:
    usable = usable_device_memory(savings.without_savings(config), machine.facts)

    def resolve(run: RunConfig) -> RunConfig | None:
        # Looked at first, because activations take long to plan.
        all_on_host = savings.with_changes(run, _on_host(run)[-1])
        is_too_large = 0 < usable < state_on_device(all_on_host)
        return None if is_too_large else resolve_if_legal(run, machine.facts)

    def cost(run: RunConfig) -> float:  # what the host delays is seen only when it is timed
        return _bound(run, machine) * (1 + 0.02 * savings.share_on_host(run))

    return Space(ways=ways, cost=cost, is_bounded=True, resolve=resolve, kind=lambda _, run: Layout.of(run))


def _ways(config: RunConfig, machine: Machine, seen: list[Found]) -> Iterator[Way]:
    """The ways of all layouts that could be the fastest."""
    fastest, too_large, num_seen = math.inf, set[Layout](), 0
    for layout in _layouts(config, machine):
        sizes = layout._replace(micro_batch=0)
        plain = savings.with_changes(config, (_layout_change(config, machine, layout),))
        if sizes in too_large or _bound(savings.without_savings(plain), machine) > _FAR * fastest:
            continue
        yield from _ways_of(layout, config, machine)
        costs = [each.cost for each in seen[num_seen:] if each.fit.is_whole]
        fastest, num_seen = min([fastest, *costs]), len(seen)
        if not costs:  # with a smaller micro-batch already
            too_large.add(sizes)


def _ways_of(layout: Layout, config: RunConfig, machine: Machine) -> Iterator[Way]:
    """A layout with every choice of one change of each saving on the device, and steps to the host."""
    change = _layout_change(config, machine, layout)
    run = savings.without_savings(savings.with_changes(config, (change,)))
    tried = [saving.searched(run) for saving in savings.SAVINGS if not saving.goes_to_host]
    plain = tuple(each[0] for saving in savings.SAVINGS if (each := saving.searched(run)))
    for on_device in product(*filter(None, tried)):
        changes = (change, *plain, *on_device)
        yield Way(changes, _on_host(savings.with_changes(config, changes)))


def _on_host(config: RunConfig) -> list[savings.Changes]:
    """Every choice of one change of each saving that goes to the host; each leaves less on the device."""
    tried = (saving.searched(config) for saving in savings.SAVINGS if saving.goes_to_host)
    return [*product(*filter(None, tried))]


def _layouts(config: RunConfig, machine: Machine) -> Iterator[Layout]:
    """All sizes that divide devices, heads, layers and the global batch."""
    world, model = machine.num_devices, config.model
    for tp in _divisors(machine.devices_per_node):
        for pp in _divisors(world // tp):
            layers = _counted_layers(model.num_layers, pp)
            if layers % pp:
                continue
            for cp in _divisors(world // (tp * pp)):
                if cp > 1 and config.sample_length // cp < savings.SHORTEST_PIECE:
                    continue
                replicas = world // (tp * pp * cp)
                for vpp in (1, 2, 4) if pp > 1 else (1,):
                    for size in MICRO_BATCHES:
                        fits = config.training.global_batch_size % (size * replicas) == 0
                        if fits and layers % (pp * vpp) == 0:
                            for ep in _divisors(math.gcd(world // pp, model.num_experts or 1)):
                                yield Layout(tp, pp, vpp, cp, size, ep)


def _counted_layers(num_layers: int, pp_size: int) -> int:
    """Layers that stages split evenly; if they do not divide, embedding and loss count too."""
    return num_layers if num_layers % pp_size == 0 else num_layers + 2


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _layout_change(config: RunConfig, machine: Machine, layout: Layout) -> savings.Change:
    num_layers = config.model.num_layers
    counted = _counted_layers(num_layers, layout.pp)
    of_stage = counted // (layout.pp * layout.vpp)
    parallel = savings.changed(
        "parallel", tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp, cp_comm_type=None, sequence_parallel=layout.tp > 1,
        num_layers_per_virtual_pipeline_stage=of_stage if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=None, account_for_embedding_in_pipeline_split=counted > num_layers,
        account_for_loss_in_pipeline_split=counted > num_layers, nnodes=machine.nodes,
        nproc_per_node=machine.devices_per_node,
    )  # fmt: skip
    of_experts = 1 if layout.ep > 1 else None
    experts = savings.changed(
        "experts", expert_model_parallel_size=layout.ep, expert_tensor_parallel_size=of_experts
    )
    training = savings.changed("training", micro_batch_size=layout.micro_batch)
    return savings.Change("layout", parallel.values + experts.values + training.values)


def _bound(config: RunConfig, machine: Machine) -> float:
    """Seconds that a step takes roughly: the passes of the heaviest rank and equal stages' idle time."""
    costs = step_costs(config, machine)
    pp_size, schedule = config.parallel.pipeline_model_parallel_size, Schedule.of(config)
    passes = max(
        sum(costs.forward[rank::pp_size])
        + sum(costs.backward[rank::pp_size])
        + sum(wait.forward + wait.backward for wait in costs.waits[rank::pp_size])
        for rank in range(pp_size)
    )
    seconds = costs.travel.reduce.seconds(max(costs.parameters))
    reductions = (config.reductions_per_step - 1) * max(0.0, seconds - passes)
    update = costs.states * costs.update
    return config.num_micro_batches * passes * (1 + 0.9 * schedule.formula) + reductions + update
