"""Changes that make a run fit, as flags to add; the fastest step first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, combinations

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.describe import shortages
from patch.plan.fits import Candidates, SearchResult, SearchSpace, best, fit_of
from patch.plan.memory import bytes_per_rank, device_memory, needed_bytes
from patch.plan.resolve import resolve_if_legal
from patch.plan.savings import SAVINGS, Change
from patch.plan.timing.machine import Machine, machines_of
from patch.plan.timing.step_time import step_time
from patch.text import size_text, timed

_RANK, _NF4 = ("lora_rank", 16), ("quantize_base", "nf4")
_MOST_CHANGES = 3
_NUM_SHOWN = 3
_NVLS = (9, 0)
"""Compute capability from which NCCL sums in NVLink's switch, with buffers of its own."""


def suggest(config: RunConfig, machine: MachineFacts, timed_on: Machine | None = None) -> list[SearchResult]:
    """Return the sets of changes that make a run fit, the fastest first; [] if it fits, or none helps.

    If sets differ only in a number (TP 2 or 4), the fastest is returned. Rates come from `timed_on`, or else
    from machines like `machine`.
    """
    changes = [change for saving in SAVINGS for change in saving.changes(config)]
    seen: list[SearchResult] = []

    def ways() -> Iterator[Candidates]:
        for some in chain.from_iterable(combinations(changes, n) for n in range(1, _MOST_CHANGES + 1)):
            fields = [field for change in some for field, _ in change.values]
            enough = (each.changes for each in seen if each.fit.is_whole)
            if len(fields) == len(set(fields)) and not any(set(less) <= set(some) for less in enough):
                yield Candidates(some)

    return _fitting(config, machine, timed_on, ways(), seen)[:_NUM_SHOWN]


def _fitting(
    config: RunConfig, machine: MachineFacts, timed_on: Machine | None, ways: Iterable[Candidates],
    seen: list[SearchResult] | None = None,
) -> list[SearchResult]:  # fmt: skip
    if fit_of(config, machine).is_whole:
        return []
    rates = timed_on or machines_of(config, machine)
    space = SearchSpace(
        ways=ways,
        cost=lambda run: 0.0 if rates is None else step_time(run, rates).seconds,
        resolve=lambda run: resolve_if_legal(run, machine),
        kind=lambda changes, run: frozenset(change.kind for change in changes),
    )
    return [each for each in best(config, machine, space, seen) if each.fit.is_whole]


def _text(cure: SearchResult) -> str:
    needs = [f"{size_text(cure.fit.device_needed)} a rank"]
    if cure.fit.host_needed:
        needs.append(f"{size_text(cure.fit.host_needed)} of a machine's host memory")
    needs += [f"{timed(cure.cost)} a step"] if cure.cost else []
    places = [place for change in cure.changes for place in change.places]
    positions = f"; by position: {', '.join(places)}" if places else ""
    return f"{cure.flags} ({', '.join(needs)}{positions})"


def lora_hint(config: RunConfig, machine: MachineFacts, timed_on: Machine | None = None) -> str:
    """Suggest LoRA, or else QLoRA, if that makes an oversized run fit; else return ""."""
    ways = ((_RANK,), (_RANK, _NF4)) if not config.adapter.is_on else ((_NF4,),)
    for values in ways:
        for cure in _fitting(config, machine, timed_on, [Candidates((Change("adapter", values),))]):
            return f"{'QLoRA' if _NF4 in values else 'LoRA'} of this run fits: {_text(cure)}"
    return ""


def suggestions(config: RunConfig, machine: MachineFacts, timed_on: Machine | None = None) -> list[str]:
    """Return a line for each set of changes, and one for adapters, that make a run fit."""
    lines = [*map(_text, suggest(config, machine, timed_on)), lora_hint(config, machine, timed_on)]
    return [line for line in lines if line]


def memory_shortfall(config: RunConfig, machine: MachineFacts) -> str:
    """Return what would help a run that no set of changes makes fit."""
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
        ConfigError: it cannot fit; the message names changes that make it fit.
    """
    lacking = shortages(config, machine)
    if not machine.cuda_devices:  # a simulated device stops no run
        lacking.pop("device", None)
    if not lacking:
        return
    found = "".join(f"\n    {each}" for each in suggestions(config, machine))
    cure = f"it would fit with one of{found}\n  " if found else f"{memory_shortfall(config, machine)} "
    what = "; ".join(lacking.values())
    raise ConfigError(f"this run cannot fit: {what}. By the plan {cure}(--force starts it anyway)")


def advice(config: RunConfig, machine: MachineFacts, *, on_device: bool) -> str:
    """Return changes, in one or two sentences, for a run whose device or host ran out of memory."""
    state, limit = bytes_per_rank(config), device_memory(config, machine)
    needed, more = state.weights + state.gradients, ["more processes (TP, PP)"]
    if not on_device:
        needed, limit = needed_bytes(config, machine)[1], machine.host_memory_bytes
        more = ["less offload"] * bool(machine.cuda_devices) + ["more machines (TP, PP)"]
    ways: dict[str, str] = {}
    for row in SAVINGS[:-1]:  # `more` has the changes of the last one
        for change in row.changes(config) if on_device or row.frees_host else ():
            if row.goes_to_host or change.kind not in ways:
                ways[change.kind] = change.flags
    if on_device and config.world_size > 1 and machine.compute_capability >= _NVLS:
        ways["NCCL"] = "NCCL_NVLS_ENABLE=0 in the environment (fewer buffers of NCCL)"
    *others, last = [*ways.values(), *more]
    take = f"take {', '.join(others)}, or {last}" if others else f"take {last}"
    if on_device and (found := suggest(config, machine)):
        take += f"; by the plan it fits with {'; or with '.join(map(_text, found))}"
    if 0 < limit < needed:
        take = f"the model's state alone takes {size_text(needed)} of {size_text(limit)}: {take}"
    return take
