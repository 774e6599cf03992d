"""The choice of `--recompute-granularity auto` (AC=auto): the cheapest way to fit activations on the device.

Looked at are: all kept; selective; the first layers of each stage offloaded, the others kept whole or with
selective; the first layers recomputed; all layers recomputed, also in blocks. Of each, the fewest layers that
fit. Costs are in forwards of a layer, by the time model (timing/layer_time.py): recomputation repeats one; an
offloaded layer costs what its copies take longer than the forward and backward beside which they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.logger import get_logger
from patch.numbers import size_text
from patch.plan.best import Found, Space, Way, best
from patch.plan.memory import device_memory, usable_device_memory
from patch.plan.parameters import layer_kinds
from patch.plan.savings import Mix, with_changes
from patch.plan.timing.layer_time import layer_times
from patch.plan.timing.machine import Machine
from patch.plan.timing.machine_presets import machines_of

_logger = get_logger(__name__)

SELECTIVE_COST = 0.05
"""Share of a layer's forward, where the device's speed is not known: selective recomputation repeats no
product, but reads and writes memory."""
OFFLOAD_COST = 0.1
"""Share of a layer's forward, also where its copies are hidden, which take bandwidth from compute.
Assumed."""


def resolve_activations(config: RunConfig, machine: MachineFacts) -> tuple[RunConfig, list[str]]:
    """Replace `auto` by the cheapest mix that fits, or by the smallest that fits the host.

    Returns:
        the run with the flags of a mix instead of auto, and lines about what was looked at.
    """
    if config.training.recompute_granularity != "auto":
        return config, []
    config = with_changes(config, (Mix().change,))
    # A simulated device has no speed.
    timed_on = machines_of(config, machine) if machine.cuda_devices else None
    seen: list[Found] = []
    space = Space(
        ways=_ways(config, seen), cost=lambda run: _cost(run, timed_on), kind=lambda changes, _: changes
    )
    chosen = best(config, machine, space, seen)[0]
    if not chosen.fit.is_whole:
        _logger.warning(
            "--recompute-granularity auto: no mix fits the device, so this run may end out of memory: more "
            "PP, TP or CP, a smaller micro-batch or optimizer offload need less"
        )
    sizes = [size_text(memory(config, machine)) for memory in (usable_device_memory, device_memory)]
    speed = "speed unknown, so recomputation goes before offload"
    if timed_on is not None:
        seconds = layer_times(layer_kinds(config)[1], timed_on).forward.total
        speed = f"a layer's forward takes {1e3 * seconds:.1f} ms by plan"
    lines = [f"{sizes[0]} of the {sizes[1]} of a device may be used, {speed}"]
    lines += [_line(each, timed_on, is_chosen=each is chosen) for each in seen]
    return chosen.run, [f"--recompute-granularity auto: {line}" for line in lines]


def _ways(config: RunConfig, seen: list[Found]) -> Iterator[Way]:
    """All kept, selective, and each other kind with ever more layers, until one fits."""
    most = max(config.stage_layers)
    counts = range(1, most + 1)
    yield Way((Mix().change,))
    if seen[-1].fit.is_whole:
        return
    yield Way((Mix("selective").change,))
    yield Way((), [(Mix(offloaded=layers).change,) for layers in counts])
    yield Way((), [(Mix("selective", offloaded=layers).change,) for layers in counts])
    if most > 1:
        yield Way((), [(Mix("full", "block", layers).change,) for layers in counts[:-1]])
    for block in counts:
        if math.gcd(block, *config.stage_layers) == block:
            yield Way((Mix("full", recomputed=block).change,))
            if seen[-1].fit.is_whole:
                return


def _cost(config: RunConfig, timed_on: Machine | None) -> float:
    """Cost of a micro-batch in the largest stage: more than if all is kept, in forwards of a layer."""
    mix, num_layers = Mix.of(config), max(config.stage_layers)
    if mix.granularity == "full":
        return float(num_layers if mix.method == "uniform" else mix.recomputed)
    selective, offload = SELECTIVE_COST, num_layers + 1.0  # rather recompute all
    if timed_on is not None:
        times = layer_times(layer_kinds(config)[1], timed_on)  # of layers with experts
        forward = times.forward.total
        selective, offload = times.selective / forward, OFFLOAD_COST + times.offload / forward
    return (selective * num_layers if mix.granularity == "selective" else 0.0) + mix.offloaded * offload


def _line(found: Found, timed_on: Machine | None, *, is_chosen: bool) -> str:
    """A line about a mix."""
    fit, cost = found.fit, _cost(found.run, timed_on)
    host = "" if fit.is_on_host else ", which host memory has no room for"
    in_stage = f"({max(found.run.stage_layers)} in a stage)"
    costs = f", costs {cost:.1f} forwards of a layer {in_stage}" if cost else ""
    chosen = "" if not is_chosen else ", chosen" if fit.is_whole else ", chosen, although too much"
    return f"{Mix.of(found.run).words} needs {size_text(fit.device_needed)} a rank{host}{costs}{chosen}"
