"""The changes with which a run that does not fit would fit, as flags to add, the fastest step first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import combinations
from typing import Any, NamedTuple

from patch.config import RunConfig
from patch.config.choices import ZeroStage
from patch.config.fields import FIELDS
from patch.config.flags import flag_words
from patch.config.positions import place_of
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.context_parallel import SHORTEST_PIECE
from patch.plan.fits import Fit, fit_of
from patch.plan.resolve import resolve_if_legal
from patch.plan.timing.machine import Machine
from patch.plan.timing.machine_presets import machines_of
from patch.plan.timing.step_time import step_time
from patch.storage.sizes import size_text, timed

_MOST_CHANGES = 3
_NUM_SHOWN = 3
_SMALL_BUCKET = 100_000_000
"""Elements; ZeRO-2 has three staging buffers of a bucket's size."""


class Change(NamedTuple):
    """One way to save memory."""

    kind: str
    """One word for several values for the same purpose, which are alternatives."""
    values: tuple[tuple[str, str, Any], ...]
    """Section, field and value; a value of None takes back what the run has."""

    @property
    def flags(self) -> str:
        """The flags that make the change."""
        return " ".join(word for name, scalar in self._set for word in flag_words(FIELDS[name], scalar))

    @property
    def places(self) -> list[str]:
        """The positions and environment variables that make it too, with their values."""
        return [place for name, scalar in self._set if (place := place_of(name, scalar))]

    @property
    def _set(self) -> list[tuple[str, object]]:
        """The fields that it sets, and their values as they are written."""
        return [(name, FIELDS[name].to_scalar(value)) for _, name, value in self.values if value is not None]


class Cure(NamedTuple):
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


def cures(config: RunConfig, machine: MachineFacts, timed_on: Machine | None = None) -> list[Cure]:
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
    best: dict[frozenset[str], Cure] = {}
    for chosen, run, fit in _sufficient(config, machine):
        cure = Cure(chosen, fit, _seconds(run, timed_on))
        kinds = frozenset(change.kind for change in chosen)
        if kinds not in best or _rank(cure) < _rank(best[kinds]):
            best[kinds] = cure
    return sorted(best.values(), key=_rank)[:_NUM_SHOWN]


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
    cure = f"it would fit with one of{found}\n" if found else f"{what_lacks(config, machine)} "
    raise ConfigError(f"this run cannot fit: {what}. By the plan {cure}(--force starts it all the same)")


def _sufficient(
    config: RunConfig, machine: MachineFacts
) -> Iterator[tuple[tuple[Change, ...], RunConfig, Fit]]:
    """Sets of changes with which the run fits, and with each the run and its fit; none contains another."""
    changes = list(_changes(config, machine))
    found: list[set[Change]] = []
    for number in range(1, _MOST_CHANGES + 1):
        for some in combinations(changes, number):
            fields = [field for change in some for _, field, _ in change.values]
            is_enough_already = any(smaller <= set(some) for smaller in found)
            if is_enough_already or len(fields) != len(set(fields)):
                continue
            run = resolve_if_legal(_changed(config, some), machine)
            if run is not None and (fit := fit_of(run, machine)).is_whole:
                found.append(set(some))
                yield some, run, fit


def _changed(config: RunConfig, changes: tuple[Change, ...]) -> RunConfig:
    run = config
    for change in changes:
        for section, field, value in change.values:
            replaced = dataclasses.replace(getattr(run, section), **{field: value})
            run = dataclasses.replace(run, **{section: replaced})
    return run


def _seconds(run: RunConfig, machine: Machine | None) -> float | None:
    return None if machine is None else step_time(run, machine).seconds


def _rank(cure: Cure) -> tuple[float, int, int]:
    """The fastest first, then fewer changes, then less in host memory."""
    return cure.seconds or math.inf, len(cure.changes), cure.fit.host_needed


def _changes(config: RunConfig, machine: MachineFacts) -> Iterator[Change]:
    """What a run does not use yet, the cheapest first."""
    parallel, training = config.parallel, config.training
    if config.num_state_shares > 1:
        yield from _more_sharding(config)
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        yield _change("parallel", sequence_parallel=True)
    if training.micro_batch_size > 1:
        yield _change("training", micro_batch_size=1)
    if config.recompute is None and not training.cpu_offloading:
        yield _change("training", recompute_granularity="selective")
    if config.recompute != "full" and not training.cpu_offloading:
        yield _change("training", "full", recompute_granularity="full")
    yield from _states_on_host(config)
    yield from _smaller_parts(config)


def _change(section: str, kind: str = "", **values: object) -> Change:
    return Change(kind or next(iter(values)), tuple((section, *pair) for pair in values.items()))


def _more_sharding(config: RunConfig) -> Iterator[Change]:
    if config.zero_stage is ZeroStage.NONE:
        yield _change("parallel", use_distributed_optimizer=True, data_parallel_sharding=None)
    if config.zero_stage is not ZeroStage.GRADIENTS:
        yield _change("parallel", data_parallel_sharding=ZeroStage.GRADIENTS)
    if config.optimizer.reduce_bucket_size > _SMALL_BUCKET:
        yield _change("optimizer", reduce_bucket_size=_SMALL_BUCKET)


def _states_on_host(config: RunConfig) -> Iterator[Change]:
    """Other shares of the optimizer states in host memory, in quarters."""
    optimizer = config.optimizer
    policy = optimizer.optimizer_offload_policy
    if policy == "auto":  # it takes what the device has no room for already
        return
    now = optimizer.optimizer_offload_fraction if policy else 0.0
    for fraction in (0.25, 0.5, 0.75, 1.0):
        if fraction != now:
            yield _change("optimizer", optimizer_offload_policy="static", optimizer_offload_fraction=fraction)


def _smaller_parts(config: RunConfig) -> Iterator[Change]:
    """More processes for each copy of the model."""
    parallel = config.parallel
    for factor in (2, 4, 8):
        if (tp_size := parallel.tensor_model_parallel_size * factor) <= parallel.nproc_per_node:
            yield _change("parallel", tensor_model_parallel_size=tp_size, sequence_parallel=True)
        pp_size = parallel.pipeline_model_parallel_size * factor
        yield _change("parallel", pipeline_model_parallel_size=pp_size)
        if config.sample_length // (cp_size := parallel.context_parallel_size * factor) >= SHORTEST_PIECE:
            yield _change("parallel", context_parallel_size=cp_size, cp_comm_type=None)
