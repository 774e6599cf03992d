"""The changes with which a run that does not fit would fit, as flags to add, the fastest step first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from itertools import combinations
from typing import NamedTuple

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.numbers import size_text, timed
from patch.plan.fits import Fit, fit_of
from patch.plan.memory import bytes_per_rank, device_memory, needed_bytes
from patch.plan.resolve import resolve_if_legal
from patch.plan.savings import SAVINGS, Change, less_offload
from patch.plan.timing.machine import Machine
from patch.plan.timing.machine_presets import machines_of
from patch.plan.timing.step_time import step_time

_RANK, _IN_4_BITS = ("adapter", "lora_rank", 16), ("adapter", "quantize_base", "nf4")
_MOST_CHANGES = 3
_NUM_SHOWN = 3


class ChangeSet(NamedTuple):
    """A set of changes with which a run fits."""

    changes: tuple[Change, ...]
    fit: Fit
    """With them."""
    seconds: float | None
    """Seconds of a step with them, planned; None where the device's rates are not known."""

    @property
    def flags(self) -> str:
        """What to add to the command, or to put in the place of what it has."""
        return " ".join(change.flags for change in self.changes)

    def __str__(self) -> str:
        """Flags, memory and seconds of a step with them, and the positions that say the same."""
        needs = [f"{size_text(self.fit.device_needed)} a rank"]
        if self.fit.host_needed:
            needs.append(f"{size_text(self.fit.host_needed)} of a machine's host memory")
        if self.seconds is not None:
            needs.append(f"{timed(self.seconds)} a step")
        places = [place for change in self.changes for place in change.places]
        positions = f"; by position: {', '.join(places)}" if places else ""
        return f"{self.flags} ({', '.join(needs)}{positions})"


def cures(config: RunConfig, machine: MachineFacts, timed_on: Machine | None = None) -> list[ChangeSet]:
    """The sets of changes that make a run fit, the fastest first; [] if it fits, or none is found.

    Of sets that differ only in a number (TP 2 or 4), the fastest one.

    Args:
        config: the run, its automatic choices made.
        machine: one of its machines.
        timed_on: its machines with their rates; None: those that are like `machine`.
    """
    if fit_of(config, machine).is_whole:
        return []
    timed_on = timed_on or machines_of(config, machine)
    best: dict[frozenset[str], ChangeSet] = {}
    for chosen, run, fit in _sufficient(config, machine):
        cure = ChangeSet(chosen, fit, _seconds(run, timed_on))
        kinds = frozenset(change.kind for change in chosen)
        if kinds not in best or _rank(cure) < _rank(best[kinds]):
            best[kinds] = cure
    return sorted(best.values(), key=_rank)[:_NUM_SHOWN]


def lora_line(config: RunConfig, machine: MachineFacts, timed_on: Machine | None = None) -> str:
    """That adapters beside the weights of a run fit, or else in 4 bits, which is another training.

    "" if they do not, or the run itself fits.

    Args:
        config, machine, timed_on: see `cures`.
    """
    ways = ((_RANK,), (_RANK, _IN_4_BITS)) if config.adapter.lora_rank is None else ((_IN_4_BITS,),)
    for values in () if fit_of(config, machine).is_whole else ways:
        change = Change("adapter", values)
        run = resolve_if_legal(change.applied(config), machine)
        if run is not None and (fit := fit_of(run, machine)).is_whole:
            cure = ChangeSet((change,), fit, _seconds(run, timed_on or machines_of(config, machine)))
            return f"{'QLoRA' if _IN_4_BITS in values else 'LoRA'} of this run fits: {cure}"
    return ""


def what_lacks(config: RunConfig, machine: MachineFacts) -> str:
    """What a run needs that no set of changes makes fit.

    Args:
        config, machine: see `cures`.
    """
    if fit_of(config, machine).is_on_device:
        return (
            "more host memory, more machines (with TP, PP or sharded states), a smaller model or shorter "
            "sequences are needed"
        )
    return (
        f"no {_MOST_CHANGES} changes are enough: more or larger devices are needed, or another layout "
        "(llama-patch plan --search)"
    )


def refuse_what_cannot_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse a run that needs more memory than its GPUs or their host have.

    Args:
        config: the run, its automatic choices made.
        machine: one of its machines.

    Raises:
        ConfigError: it cannot fit; the message names the changes with which it would.
    """
    fit = fit_of(config, machine)
    device = machine.cuda_memory_bytes
    if 0 < device < fit.device_needed:
        what = f"a rank needs {size_text(fit.device_needed)} of a GPU's {size_text(device)}"
    elif 0 < fit.host_usable < fit.host_needed:
        what = (
            f"the processes of a machine need {size_text(fit.host_needed)} of its host's "
            f"{size_text(fit.host_usable)}"
        )
    else:
        return
    found = "".join(f"\n    {cure}" for cure in cures(config, machine))
    cure = f"it would fit with one of{found}\n  " if found else f"{what_lacks(config, machine)} "
    if lora := lora_line(config, machine):
        cure = f"{cure.rstrip()}\n    {lora}\n  "
    raise ConfigError(f"this run cannot fit: {what}. By the plan {cure}(--force starts it all the same)")


def advice(config: RunConfig, machine: MachineFacts, *, on_device: bool) -> str:
    """What a run that ran out of memory may change, in one or two sentences.

    Args:
        config, machine: see `cures`.
        on_device: whether a GPU, or the simulated one, lacked memory, not the host.
    """
    limit, state = device_memory(config, machine), bytes_per_rank(config)
    wanted, more, lead = {"states"}, ["more machines (TP, PP)"], ""
    if on_device:
        wanted = {"states", "activations", "weights"}
        found = "; or with ".join(map(str, cures(config, machine)))
        more = ["more processes (TP, PP)" + (f"; by the plan it fits with {found}" if found else "")]
        if 0 < limit < (fixed := state.weights + state.gradients):
            wanted = {"gradients", "weights"}
            lead = f"weights and gradients alone take {size_text(fixed)} of {size_text(limit)}"
    elif machine.cuda_devices:
        more = [*less_offload(config), *more]
        wanted |= {"host memory"} if config.optimizer.optimizer_offload_policy else set()
    else:
        _, needed = needed_bytes(config, machine)
        if 0 < (usable := machine.host_memory_bytes) < needed:
            lead = f"the model's state alone takes {size_text(needed)} of {size_text(usable)}"
        else:
            wanted = {"states", "activations"}
    savings = [each for each in SAVINGS if each.frees & wanted and (on_device or not each.goes_to_host)]
    changes = [change for saving in savings for change in saving.changes(config, limit)]
    *others, last = [*(change.words for change in changes if change.words), *more]
    take = f"take {', '.join(others)}, or {last}" if others else f"take {last}"
    return f"{lead}: {take}" if lead else take


def _sufficient(
    config: RunConfig, machine: MachineFacts
) -> Iterator[tuple[tuple[Change, ...], RunConfig, Fit]]:
    """Sets of changes with which the run fits, and with each the run and its fit; none contains another."""
    changes = [change for saving in SAVINGS for change in saving.changes(config, 0) if change.values]
    found: list[set[Change]] = []
    for number in range(1, _MOST_CHANGES + 1):
        for some in combinations(changes, number):
            fields = [field for change in some for _, field, _ in change.values]
            is_enough_already = any(smaller <= set(some) for smaller in found)
            if is_enough_already or len(fields) != len(set(fields)):
                continue
            changed = reduce(lambda run, change: change.applied(run), some, config)
            run = resolve_if_legal(changed, machine)
            if run is not None and (fit := fit_of(run, machine)).is_whole:
                found.append(set(some))
                yield some, run, fit


def _seconds(run: RunConfig, machine: Machine | None) -> float | None:
    return None if machine is None else step_time(run, machine).seconds


def _rank(cure: ChangeSet) -> tuple[float, int, int]:
    """The fastest first, then fewer changes, then less in host memory."""
    return cure.seconds or math.inf, len(cure.changes), cure.fit.host_needed
