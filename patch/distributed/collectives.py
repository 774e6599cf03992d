"""Collectives on small host values: agreement on failure, what rank 0 knows, sums of counters, a barrier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist

from patch.errors import PatchError

_Value = TypeVar("_Value")


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
    # Of ours, which every rank can import: pickle refuses classes that a library makes while it runs, and
    # this rank alone would leave before the collective.
    kind = type(error) if isinstance(error, PatchError) else PatchError
    field = getattr(error, "field", None)
    reports = all_gather_object(None if error is None else (kind, str(error), field))
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


@contextmanager
def fail_together(what: str, error_type: type[PatchError]) -> Iterator[None]:
    """As `all_or_none`, and an error of another type becomes one of this type.

    Args:
        what: begins the message, such as "checkpoint X was not written".
        error_type: what the ranks raise.

    Raises:
        PatchError: of `error_type`, on every rank, when the block raised on any.
    """
    with all_or_none():
        try:
            yield
        except error_type:
            raise
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            raise error_type(f"{what}: {type(error).__name__}: {first_line}") from error


def from_rank_0(find: Callable[[], _Value]) -> _Value:
    """What `find` returns on rank 0, on every rank: a collective in a job; outside of one just `find`.

    Raises:
        Exception: what `find` raises, on all ranks (see `agree`).
    """
    if not dist.is_initialized():
        return find()
    found: list = [None]
    with all_or_none():
        if dist.get_rank() == 0:
            found = [find()]
    dist.broadcast_object_list(found, src=0)
    return found[0]


def all_gather_object(value: _Value) -> list[_Value]:
    """Every rank's value, by rank: torch's collective of this name over the whole job."""
    per_rank = [value] * dist.get_world_size()
    dist.all_gather_object(per_rank, value)
    return per_rank


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
