"""The cheapest changes with which a run that does not fit would fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from patch.config import RunConfig
from patch.config.choices import ZeroStage
from patch.config.positions import where
from patch.config.rules import is_legal
from patch.device import MachineFacts
from patch.errors import ConfigError
from patch.plan.fits import fit_of
from patch.storage.sizes import size_text

_MOST_CHANGES = 3
_UNSAID = ("data_parallel_sharding", None)


class Change(NamedTuple):
    """One setting that saves memory."""

    text: str
    """The values and flags in words."""
    cost: float
    """Of a step, in per cent and roughly: what orders the changes."""
    values: tuple[tuple[str, str, object], ...]
    """Section, field and value."""


def cures(config: RunConfig, machine: MachineFacts, num_best: int = 3) -> list[str]:
    """The cheapest sets of changes that make a run fit, in words; [] if it fits, or none is found.

    Args:
        config: the run, its automatic choices made.
        machine: one of its machines.
        num_best: at most so many.
    """
    if fit_of(config, machine).is_whole:
        return []
    changes = list(_changes(config, machine))
    found: list[tuple[float, frozenset[Change]]] = []
    for number in range(1, _MOST_CHANGES + 1):
        for some in combinations(changes, number):
            chosen = frozenset(some)
            is_enough_already = any(smaller <= chosen for _, smaller in found)
            fields = [field for change in some for _, field, _ in change.values]
            if not is_enough_already and len(fields) == len(set(fields)) and _fits(config, some, machine):
                found.append((sum(change.cost for change in some), chosen))
    found.sort(key=lambda each: each[0])
    order = {change: index for index, change in enumerate(changes)}
    return [
        " and ".join(change.text for change in sorted(chosen, key=lambda change: order[change]))
        for _, chosen in found[:num_best]
    ]


def refuse_what_cannot_fit(config: RunConfig, machine: MachineFacts) -> None:
    """Refuse a run that needs more memory than its GPUs or their host have.

    Args:
        config: the run, its automatic choices made.
        machine: one of its machines.

    Raises:
        ConfigError: it cannot fit; the message names the cheapest changes with which it would.
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
    found = cures(config, machine)
    cure = f"it would fit with {'; or with '.join(found)}" if found else "more or larger devices are needed"
    raise ConfigError(f"this run cannot fit: {what}. By the plan {cure} (--force starts it all the same)")


def _fits(config: RunConfig, changes: tuple[Change, ...], machine: MachineFacts) -> bool:
    run = config
    for change in changes:
        for section, field, value in change.values:
            replaced = dataclasses.replace(getattr(run, section), **{field: value})
            run = dataclasses.replace(run, **{section: replaced})
    return is_legal(run, machine) and fit_of(run, machine).is_whole


def _changes(config: RunConfig, machine: MachineFacts) -> Iterator[Change]:
    """What a run does not use yet, the cheapest first."""
    parallel, training = config.parallel, config.training
    if config.num_state_shares > 1 and config.zero_stage is not ZeroStage.GRADIENTS:
        if config.zero_stage is ZeroStage.NONE:
            both = (("parallel", "use_distributed_optimizer", True), ("parallel", *_UNSAID))
            yield Change(f"true at {where('use_distributed_optimizer')}", 0.0, both)
        text = f"gradients at {where('data_parallel_sharding')}"
        yield Change(text, 1.0, (("parallel", "data_parallel_sharding", ZeroStage.GRADIENTS),))
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        text = f"true at {where('sequence_parallel')}"
        yield Change(text, 0.5, (("parallel", "sequence_parallel", True),))
    size = training.micro_batch_size
    if size > 1:
        yield Change(f"1 at {where('micro_batch_size')}", 2.0, (("training", "micro_batch_size", 1),))
    flag = where("recompute_granularity")
    if config.recompute is None and not training.cpu_offloading:
        yield Change(f"sel at {flag}", 2.5, (("training", "recompute_granularity", "selective"),))
    if config.recompute != "full" and not training.cpu_offloading:
        yield Change(f"full at {flag}", 25.0, (("training", "recompute_granularity", "full"),))
    yield from _more_on_host(config)
    tp_size, pp_size = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    for factor in (2, 4, 8):
        if tp_size * factor <= parallel.nproc_per_node:
            text = f"{tp_size * factor} at {where('tensor_model_parallel_size')}"
            values = ("parallel", "tensor_model_parallel_size", tp_size * factor)
            yield Change(text, 5.0 * factor, (values, ("parallel", "sequence_parallel", True)))
        text = f"{pp_size * factor} at {where('pipeline_model_parallel_size')}"
        yield Change(text, 6.0 * factor, (("parallel", "pipeline_model_parallel_size", pp_size * factor),))


def _more_on_host(config: RunConfig) -> Iterator[Change]:
    """Optimizer states in host memory, in quarters."""
    optimizer = config.optimizer
    policy = optimizer.optimizer_offload_policy
    if policy == "auto":  # it takes what the device has no room for already
        return
    now = optimizer.optimizer_offload_fraction if policy else 0.0
    for fraction in (0.25, 0.5, 0.75, 1.0):
        if fraction > now:
            text = f"static at {where('optimizer_offload_policy')} with {fraction:g} at "
            values = ("optimizer", "optimizer_offload_policy", "static")
            share = ("optimizer", "optimizer_offload_fraction", fraction)
            text += where("optimizer_offload_fraction")
            yield Change(text, 1.0 + 4 * fraction, (values, share))
