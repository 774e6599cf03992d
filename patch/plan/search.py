"""Search for the fastest layouts of a model that fit a machine's memory.

It goes through all sizes of TP, PP, VPP, CP, EP and micro-batches that the rules allow. For each layout it
takes the cheapest fitting combination of the `SAVINGS`: sharding, recomputation, share of states on the host.
`step_time` times the layouts that could be the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from patch.config import RunConfig
from patch.plan import savings
from patch.plan.fits import Candidates, Fit, SearchResult, SearchSpace, best
from patch.plan.memory import state_on_device, usable_device_memory
from patch.plan.resolve import resolve_if_legal
from patch.plan.timing.machine import Machine
from patch.plan.timing.step_time import StepCosts, StepTime, step_time

MICRO_BATCHES = (1, 2, 4, 8)
_NUM_TIMED = 48
_FAR = 1.2
"""A layout whose plain form takes this many times as long as the fastest is skipped."""


class Layout(NamedTuple):
    """Parallel sizes and the micro-batch."""

    tp: int
    pp: int
    vpp: int
    cp: int
    micro_batch: int
    ep: int = 1


class Candidate(NamedTuple):
    """A layout that fits."""

    layout: Layout
    run: RunConfig
    """The run with this layout, its `auto` values unresolved."""
    resolved: RunConfig
    fit: Fit
    time: StepTime


def search(config: RunConfig, machine: Machine, num_best: int = 5) -> list[Candidate]:
    """Return the fastest layouts, the best of each (TP, PP, CP), fastest first; [] if none fits.

    The run's layout, micro-batch, recomputation, sharding and offload are replaced; all nodes are used.
    """
    usable = usable_device_memory(savings.without_savings(config), machine.facts)
    layouts = {_layout_change(config, machine, layout): layout for layout in _layouts(config, machine)}
    seen: list[SearchResult] = []

    def resolve(run: RunConfig) -> RunConfig | None:
        # Checked first, because activations take long to plan.
        all_on_host = savings.with_changes(run, _on_host(run)[-1])
        is_too_large = 0 < usable < state_on_device(all_on_host)
        return None if is_too_large else resolve_if_legal(run, machine.facts)

    space = SearchSpace(
        ways=_ways(config, machine, layouts, seen),
        # Only step_time sees the delays by the host.
        cost=lambda run: _bound(run, machine) * (1 + 0.02 * savings.share_on_host(run)),
        is_bounded=True,
        resolve=resolve,
        kind=lambda changes, _: changes[0],
    )
    fitting = [each for each in best(config, machine.facts, space, seen) if each.fit.is_whole][:_NUM_TIMED]
    found: dict[tuple[int, int, int], Candidate] = {}
    for changes, run, resolved, fit, bound in fitting:
        worst = sorted(each.time.seconds for each in found.values())[:num_best]
        if len(worst) == num_best and bound > worst[-1]:
            break
        layout = layouts[changes[0]]
        one = Candidate(layout, run, resolved, fit, step_time(resolved, machine))
        key = layout.tp, layout.pp, layout.cp
        if key not in found or one.time.seconds < found[key].time.seconds:
            found[key] = one
    return sorted(found.values(), key=lambda one: one.time.seconds)[:num_best]


def _ways(
    config: RunConfig, machine: Machine, layouts: Mapping[savings.Change, Layout], seen: list[SearchResult]
) -> Iterator[Candidates]:
    """All layouts with all combinations of on-device savings; their steps move more to the host."""
    fastest, too_large, num_seen = math.inf, set[Layout](), 0
    for change, layout in layouts.items():
        sizes = layout._replace(micro_batch=0)
        run = savings.without_savings(savings.with_changes(config, (change,)))
        if sizes in too_large or _bound(run, machine) > _FAR * fastest:
            continue
        tried = [saving.searched(run) for saving in savings.SAVINGS if not saving.goes_to_host]
        plain = tuple(each[0] for saving in savings.SAVINGS if (each := saving.searched(run)))
        for on_device in product(*filter(None, tried)):
            changes = (change, *plain, *on_device)
            yield Candidates(changes, _on_host(savings.with_changes(config, changes)))
        costs = [each.cost for each in seen[num_seen:] if each.fit.is_whole]
        fastest, num_seen = min([fastest, *costs]), len(seen)
        if not costs:  # with a smaller micro-batch already
            too_large.add(sizes)


def _on_host(config: RunConfig) -> list[savings.Changes]:
    """All combinations of savings that go to the host, in order of less device memory."""
    tried = (saving.searched(config) for saving in savings.SAVINGS if saving.goes_to_host)
    return [*product(*filter(None, tried))]


def _layouts(config: RunConfig, machine: Machine) -> Iterator[Layout]:
    world, model = machine.num_devices, config.model
    for tp, pp, cp in product(_divisors(machine.devices_per_node), _divisors(world), _divisors(world)):
        layers, replicas = _counted_layers(model.num_layers, pp), world // (tp * pp * cp)
        is_short = cp > 1 and config.sample_length // cp < savings.SHORTEST_PIECE
        if world % (tp * pp * cp) or layers % pp or is_short:
            continue
        for vpp, size in product((1, 2, 4) if pp > 1 else (1,), MICRO_BATCHES):
            if config.training.global_batch_size % (size * replicas) == 0 and layers % (pp * vpp) == 0:
                for ep in _divisors(math.gcd(world // pp, model.num_experts or 1)):
                    yield Layout(tp, pp, vpp, cp, size, ep)


def _counted_layers(num_layers: int, pp_size: int) -> int:
    """Layers that stages split evenly; if they do not divide, embedding and loss count too."""
    return num_layers if num_layers % pp_size == 0 else num_layers + 2


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _layout_change(config: RunConfig, machine: Machine, layout: Layout) -> savings.Change:
    num_layers, counted = config.model.num_layers, _counted_layers(config.model.num_layers, layout.pp)
    of_stage = counted // (layout.pp * layout.vpp)
    return savings.changed(
        "layout", tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp, cp_comm_type=None, sequence_parallel=layout.tp > 1,
        num_layers_per_virtual_pipeline_stage=of_stage if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=None, account_for_embedding_in_pipeline_split=counted > num_layers,
        account_for_loss_in_pipeline_split=counted > num_layers, nnodes=machine.nodes,
        nproc_per_node=machine.devices_per_node, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1 if layout.ep > 1 else None, micro_batch_size=layout.micro_batch,
    )  # fmt: skip


def _bound(config: RunConfig, machine: Machine) -> float:
    """Rough seconds of a step: the passes of the slowest rank, and the idle time of equal stages."""
    costs = StepCosts(config, machine)
    passes = 0.0
    for rank in range(costs.schedule.pp_size):
        forward, backward, waits = costs.of_rank(rank)
        passes = max(passes, forward + backward + sum(wait.forward + wait.backward for wait in waits))
    seconds = costs.data_parallel.reduce.seconds(max(each.total for each in costs.parameters))
    reductions = (config.reductions_per_step - 1) * max(0.0, seconds - passes)
    update = costs.states * costs.update
    return config.num_micro_batches * passes * (1 + 0.9 * costs.schedule.formula) + reductions + update
