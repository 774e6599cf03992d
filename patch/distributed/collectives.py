"""Collectives on small host values: agreement on failure, sums of counters, a barrier."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
import torch.distributed as dist

from patch.errors import PatchError


def agree(error: Exception | None) -> None:
    """Fail on all ranks or on none: a collective over the whole job.

    Every rank calls it after work that can fail on one rank alone (reading, writing), before the next
    collective that a failed rank would never reach.

    Raises:
        Exception: this rank's own `error`; on ranks that had none, the lowest failed rank's error, as
            the same class when it is one of ours, with that rank named.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    reports: list = [None] * dist.get_world_size()
    # Of ours, which every rank can import: pickle refuses classes that a library makes while it runs, and
    # this rank alone would leave before the collective.
    kind = type(error) if isinstance(error, PatchError) else PatchError
    field = getattr(error, "field", None)
    dist.all_gather_object(reports, None if error is None else (kind, str(error), field))
    if error is not None:
        raise error
    for rank, report in enumerate(reports):
        if report is not None:
            kind, message, field = report
            raise kind(f"rank {rank}: {message}", field=field)


@contextmanager
def all_or_none() -> Iterator[None]:
    """A block of this rank's own work; after it every rank raises when any has failed. Collective.

    Raises:
        Exception: as `agree`.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        failure = error
    agree(failure)


def barrier(device: torch.device) -> None:
    """Wait for all ranks; on a GPU it is this one that meets the others'."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def sum_over(group: dist.ProcessGroup, values: list[float], device: torch.device) -> list[float]:
    """The sums of `values` over a group, added up in float64, on every rank of it."""
    return _reduce(values, device, dist.ReduceOp.SUM, group)


def max_over_world(values: list[float], device: torch.device) -> list[float]:
    """The largest of each value over all ranks; NaN where a rank has it, which a maximum may lose."""
    flags = [float(math.isnan(value)) for value in values]
    reduced = _reduce([*values, *flags], device, dist.ReduceOp.MAX, None)
    largest, is_nan = reduced[: len(values)], reduced[len(values) :]
    return [math.nan if flag else value for value, flag in zip(largest, is_nan, strict=True)]


def _reduce(
    values: list[float],
    device: torch.device,
    operation: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None,
) -> list[float]:
    # On a stream of its own: the host waits for the other ranks, not for what its GPU has yet to compute.
    with torch.cuda.stream(_stream(device)) if device.type == "cuda" else nullcontext():
        reduced = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(reduced, operation, group)
        return reduced.tolist()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
