"""The search of layouts: the fastest ways to train a model on a machine that fit its memory.

All sizes of TP, PP, VPP, CP, EP and micro-batches that the rules allow are looked at. Of each the cheapest
way that fits is taken, of what the rows of `SAVINGS` have for a search: what is sharded, what is recomputed,
which share of the states is on the host. Those that could be the fastest are timed by `step_time`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import product
from typing import NamedTuple

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan.fits import Fit, fit_of
from patch.plan.memory import state_on_device, usable_device_memory
from patch.plan.pipeline import Schedule
from patch.plan.resolve import resolve_if_legal
from patch.plan.savings import SAVINGS, SHORTEST_PIECE, Change, share_on_host, without_savings
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


class Found(NamedTuple):
    """A layout that fits."""

    layout: Layout
    run: RunConfig
    """The run with it; what is left to `auto` is still so."""
    resolved: RunConfig
    fit: Fit
    time: StepTime


def search(config: RunConfig, machine: Machine, num_best: int = 5) -> list[Found]:
    """The fastest layouts, the best of each TP, PP and CP, fastest first; [] if nothing fits.

    Args:
        config: the run; its layout, micro-batch, recomputation, sharding and offload are replaced.
        machine: all nodes of it are used.
        num_best: at most so many.
    """
    candidates: list[tuple[float, Layout, RunConfig, RunConfig]] = []
    fastest, too_large = math.inf, set[Layout]()
    for layout in _layouts(config, machine):
        sizes = layout._replace(micro_batch=0)
        if sizes in too_large:  # with a smaller micro-batch already
            continue
        run = _with_layout(config, machine, layout)
        if _bound(run, machine) > _FAR * fastest:
            continue
        if (cheapest := _cheapest(run, machine)) is None:
            too_large.add(sizes)
        else:
            bound = _bound(cheapest[1], machine)
            fastest = min(fastest, bound)
            candidates.append((bound, layout, *cheapest))
    candidates.sort(key=lambda candidate: candidate[0])
    found: dict[tuple[int, int, int], Found] = {}
    for bound, layout, run, resolved in candidates[:_NUM_TIMED]:
        worst = sorted(each.time.seconds for each in found.values())[:num_best]
        if len(worst) == num_best and bound > worst[-1]:
            break
        one = Found(layout, run, resolved, fit_of(resolved, machine.facts), step_time(resolved, machine))
        key = layout.tp, layout.pp, layout.cp
        if key not in found or one.time.seconds < found[key].time.seconds:
            found[key] = one
    return sorted(found.values(), key=lambda one: one.time.seconds)[:num_best]


def fits_somewhere(config: RunConfig, machine: Machine) -> bool:
    """Whether any layout fits.

    Args:
        config, machine: see `search`.
    """
    smallest_last = list(_layouts(config, machine))
    return any(_cheapest(_with_layout(config, machine, one), machine) for one in reversed(smallest_last))


def _layouts(config: RunConfig, machine: Machine) -> Iterator[Layout]:
    """All sizes that divide devices, heads, layers and the global batch."""
    world, model = machine.num_devices, config.model
    for tp in _divisors(machine.devices_per_node):
        for pp in _divisors(world // tp):
            layers = _counted_layers(model.num_layers, pp)
            if layers % pp:
                continue
            for cp in _divisors(world // (tp * pp)):
                if cp > 1 and config.sample_length // cp < SHORTEST_PIECE:
                    continue
                replicas = world // (tp * pp * cp)
                for vpp in (1, 2, 4) if pp > 1 else (1,):
                    for size in MICRO_BATCHES:
                        fits = config.training.global_batch_size % (size * replicas) == 0
                        if fits and layers % (pp * vpp) == 0:
                            for ep in _divisors(math.gcd(world // pp, model.num_experts or 1)):
                                yield Layout(tp, pp, vpp, cp, size, ep)


def _counted_layers(num_layers: int, pp_size: int) -> int:
    """What stages share evenly: the layers; where they do not divide, embedding and loss too."""
    return num_layers if num_layers % pp_size == 0 else num_layers + 2


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _with_layout(config: RunConfig, machine: Machine, layout: Layout) -> RunConfig:
    num_layers = config.model.num_layers
    counted = _counted_layers(num_layers, layout.pp)
    of_stage = counted // (layout.pp * layout.vpp)
    parallel = dataclasses.replace(
        config.parallel,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        cp_comm_type=None,
        sequence_parallel=layout.tp > 1,
        num_layers_per_virtual_pipeline_stage=of_stage if layout.vpp > 1 else None,
        pipeline_model_parallel_layout=None,
        account_for_embedding_in_pipeline_split=counted > num_layers,
        account_for_loss_in_pipeline_split=counted > num_layers,
        nnodes=machine.nodes,
        nproc_per_node=machine.devices_per_node,
    )
    training = dataclasses.replace(config.training, micro_batch_size=layout.micro_batch)
    experts = dataclasses.replace(
        config.experts,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=1 if layout.ep > 1 else None,
    )
    return without_savings(dataclasses.replace(config, parallel=parallel, training=training, experts=experts))


def _searched(config: RunConfig, *, on_host: bool) -> Iterator[tuple[Change, ...]]:
    """Every choice of one change of each saving: of those that move to the host, or of the others."""
    tried = (saving.searched(config) for saving in SAVINGS if saving.goes_to_host == on_host)
    return product(*filter(None, tried))


def _with(config: RunConfig, changes: Sequence[Change]) -> RunConfig:
    return reduce(lambda run, change: change.applied(run), changes, config)


def _cheapest(config: RunConfig, machine: Machine) -> tuple[RunConfig, RunConfig] | None:
    """A run that fits at the least cost, also with its choices made; None if none fits or is legal."""
    best: tuple[float, RunConfig, RunConfig] | None = None
    for on_device in _searched(config, on_host=False):
        run = _with(config, on_device)
        if (resolved := resolve_if_legal(run, machine.facts)) is None:
            continue
        if best is not None and _bound(resolved, machine) >= best[0]:  # the host only adds to it
            continue
        on_host = _least_on_host(resolved, machine.facts)
        if on_host is None:
            continue
        run, resolved = _with(run, on_host), _with(resolved, on_host)
        # What the host delays is seen only when it is timed.
        bound = _bound(resolved, machine) * (1 + 0.02 * share_on_host(resolved))
        if best is None or bound < best[0]:
            best = bound, run, resolved
    return best[1:] if best else None


def _least_on_host(config: RunConfig, machine: MachineFacts) -> tuple[Change, ...] | None:
    """What moves the least to the host of what lets a run fit; None if nothing does."""
    nothing, *others = _searched(config, on_host=True)
    all_on_host = _with(config, others[-1])
    # Looked at first, because activations take long to plan.
    if 0 < usable_device_memory(config, machine) < state_on_device(all_on_host):
        return None
    if fit_of(config, machine).is_whole:
        return nothing
    if not fit_of(all_on_host, machine).is_on_device:
        return None
    return next((some for some in others if fit_of(_with(config, some), machine).is_whole), None)


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
