"""The changes with which a run that does not fit would fit, as flags to add, the fastest step first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, combinations

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.numbers import size_text, timed
from patch.plan.describe import shortages
from patch.plan.fits import Found, Space, Way, best, fit_of
from patch.plan.memory import bytes_per_rank, device_memory, needed_bytes
from patch.plan.resolve import resolve_if_legal
from patch.plan.savings import SAVINGS, Change
from patch.plan.timing.machine import Machine, machines_of
from patch.plan.timing.step_time import step_time

_RANK, _IN_4_BITS = ("adapter", "lora_rank", 16), ("adapter", "quantize_base", "nf4")
_MOST_CHANGES = 3
_NUM_SHOWN = 3


def cures(config: RunConfig, machine: MachineFacts, timed_on: Machine | None = None) -> list[Found]:
    """The sets of changes that make a run fit, the fastest first; [] if it fits, or none is found.

    Of sets that differ only in a number (TP 2 or 4), the fastest one.

    Args:
        config: the run, its automatic choices made.
        machine: one of its machines.
        timed_on: its machines with their rates; None: those that are like `machine`.
    """
    changes = [change for saving in SAVINGS for change in saving.changes(config)]
    seen: list[Found] = []

    def ways() -> Iterator[Way]:
        for some in chain.from_iterable(combinations(changes, n) for n in range(1, _MOST_CHANGES + 1)):
            fields = [field for change in some for _, field, _ in change.values]
            enough = (each.changes for each in seen if each.fit.is_whole)
            if len(fields) == len(set(fields)) and not any(set(less) <= set(some) for less in enough):
                yield Way(some)

    return _fitting(config, machine, ways(), timed_on, seen)[:_NUM_SHOWN]


def _fitting(
    config: RunConfig,
    machine: MachineFacts,
    ways: Iterable[Way],
    timed_on: Machine | None,
    seen: list[Found] | None = None,
) -> list[Found]:
    """The fastest ways of each kind that make a run fit; [] if it fits."""
    if fit_of(config, machine).is_whole:
        return []
    rates = timed_on or machines_of(config, machine)
    space = Space(
        ways=ways,
        cost=lambda run: 0.0 if rates is None else step_time(run, rates).seconds,
        resolve=lambda run: resolve_if_legal(run, machine),
        kind=lambda changes, run: frozenset(change.kind for change in changes),
    )
    return [each for each in best(config, machine, space, seen) if each.fit.is_whole]


def _text(cure: Found) -> str:
    """Flags, memory and, where rates are known, seconds of a step; and the positions that say the same."""
    needs = [f"{size_text(cure.fit.device_needed)} a rank"]
    if cure.fit.host_needed:
        needs.append(f"{size_text(cure.fit.host_needed)} of a machine's host memory")
    needs += [f"{timed(cure.cost)} a step"] if cure.cost else []
    places = [place for change in cure.changes for place in change.places]
    positions = f"; by position: {', '.join(places)}" if places else ""
    return f"{cure.flags} ({', '.join(needs)}{positions})"


def lora_line(config: RunConfig, machine: MachineFacts, timed_on: Machine | None = None) -> str:
    """A line that adapters beside the run's weights fit, or else beside 4 bits, which is another training.

    "" if they do not, or the run itself fits.
    """
    ways = ((_RANK,), (_RANK, _IN_4_BITS)) if config.adapter.lora_rank is None else ((_IN_4_BITS,),)
    for values in ways:
        for cure in _fitting(config, machine, [Way((Change("adapter", values),))], timed_on):
            return f"{'QLoRA' if _IN_4_BITS in values else 'LoRA'} of this run fits: {_text(cure)}"
    return ""


def suggestions(config: RunConfig, machine: MachineFacts, timed_on: Machine | None = None) -> list[str]:
    """A line for each set of changes, and one for adapters, with which a run would fit."""
    lines = [*map(_text, cures(config, machine, timed_on)), lora_line(config, machine, timed_on)]
    return [line for line in lines if line]


def what_lacks(config: RunConfig, machine: MachineFacts) -> str:
    """The shortage of a run that no set of changes makes fit."""
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

    Raises:
        ConfigError: it cannot fit; the message names the changes with which it would.
    """
    lacking = shortages(config, machine)
    if not machine.cuda_devices:  # a simulated device stops no run
        lacking.pop("device", None)
    if not lacking:
        return
    found = "".join(f"\n    {each}" for each in suggestions(config, machine))
    cure = f"it would fit with one of{found}\n  " if found else f"{what_lacks(config, machine)} "
    what = "; ".join(lacking.values())
    raise ConfigError(f"this run cannot fit: {what}. By the plan {cure}(--force starts it all the same)")


def advice(config: RunConfig, machine: MachineFacts, *, on_device: bool) -> str:
    """Changes for a run that ran out of memory, in one or two sentences.

    Args:
        config, machine: see `cures`.
        on_device: whether a GPU, or the simulated one, lacked memory, not the host.
    """
    state, limit = bytes_per_rank(config), device_memory(config, machine)
    needed, more = state.weights + state.gradients, ["more processes (TP, PP)"]
    if not on_device:
        needed, limit = needed_bytes(config, machine)[1], machine.host_memory_bytes
        more = ["less offload"] * bool(machine.cuda_devices) + ["more machines (TP, PP)"]
    ways: dict[str, str] = {}
    for row in SAVINGS[:-1]:  # the last one's are in `more`
        for change in row.changes(config) if on_device or row.frees_host else ():
            if row.goes_to_host or change.kind not in ways:
                ways[change.kind] = change.flags
    *others, last = [*ways.values(), *more]
    take = f"take {', '.join(others)}, or {last}" if others else f"take {last}"
    if on_device and (found := cures(config, machine)):
        take += f"; by the plan it fits with {'; or with '.join(map(_text, found))}"
    if 0 < limit < needed:
        take = f"the model's state alone takes {size_text(needed)} of {size_text(limit)}: {take}"
    return take
