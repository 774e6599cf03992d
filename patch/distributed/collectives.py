"""Collectives on small host values: agreement on failure, broadcast from rank 0, sums, maxima, a barrier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from patch.device import stream_of, streams_of
from patch.distributed.async_collectives import SMALL_VALUES
from patch.errors import PatchError

_Value = TypeVar("_Value")
_Error = TypeVar("_Error", bound=Exception)
_MARK = "is_on_all_ranks"


def on_all_ranks(error: _Error) -> _Error:
    """Mark and return an error that all ranks raise at the same place: its handler may use collectives."""
    setattr(error, _MARK, True)
    return error


def is_on_all_ranks(error: Exception) -> bool:
    """Return whether `on_all_ranks` marked the error, or there is only a single rank."""
    return getattr(error, _MARK, False) or dist.get_world_size() == 1


@contextmanager
def all_or_none() -> Iterator[None]:
    """Context for work that may fail on a single rank (reading, writing): at its end all or no ranks raise.

    A collective over the whole job. Every rank enters it before the next collective, which a failed rank
    would never reach. Without a job, the error is raised unchanged.

    Raises:
        Exception: this rank's own error. Ranks without an error raise the error of the lowest failed rank,
            which the message names: as the same subclass of PatchError or, for other errors, as PatchError.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        failure = error
    # Only our own classes are sent, because every rank can import them. pickle refuses a class that a library
    # creates at run time: this rank would then fail before the collective, and the other ranks would wait.
    kind = type(failure) if isinstance(failure, PatchError) else PatchError
    field = failure.field if isinstance(failure, PatchError) else None
    reports = all_gather_object(None if failure is None else (kind, str(failure), field))
    if failure is not None:
        raise on_all_ranks(failure)
    for rank, report in enumerate(reports):
        if report is not None:
            kind, message, field = report
            raise on_all_ranks(kind(f"rank {rank}: {message}", field=field))


@contextmanager
def fail_together(what: str, error_type: type[PatchError]) -> Iterator[None]:
    """Context like `all_or_none`, but other errors become `error_type`.

    Args:
        what: beginning of the message, such as "checkpoint X was not written".
    """
    with all_or_none():
        try:
            yield
        except error_type:
            raise
        except Exception as error:
            first_line = (str(error).strip().splitlines() or [""])[0]
            field = getattr(error, "field", None)
            raise error_type(f"{what}: {type(error).__name__}: {first_line}", field=field) from error


def from_rank_0(find: Callable[[], _Value]) -> _Value:
    """Broadcast the value that `find` returns on rank 0. Collective; without a job, just call `find`.

    Raises:
        Exception: any error of `find`, on all ranks (see `all_or_none`).
    """
    if not dist.is_initialized():
        return find()
    values: list = [None]
    with all_or_none():
        if dist.get_rank() == 0:
            values = [find()]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def all_gather_object(value: _Value) -> list[_Value]:
    """Gather the values of all ranks in rank order, by torch's collective of this name, over the job.
    Without a job, return [value].
    """
    if not dist.is_initialized():
        return [value]
    per_rank = [value] * dist.get_world_size()
    dist.all_gather_object(per_rank, value)
    return per_rank


def barrier(device: torch.device) -> None:
    """Wait for all ranks; NCCL gets this GPU explicitly, because torch would have to guess it."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def sum_over(group: dist.ProcessGroup, values: list[float], device: torch.device) -> list[float]:
    """Return the sum of each value over a group, in float64, on every rank of the group."""
    return _reduce(values, device, dist.ReduceOp.SUM, group)


def max_over_world(values: list[float], device: torch.device) -> list[float]:
    """Return each value's maximum over all ranks; NaN if any rank has NaN, which a plain max may lose."""
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
    # Not on the compute stream: the host then waits for the other ranks, but not for work queued on its GPU.
    with streams_of(device).stream(stream_of(device, SMALL_VALUES)):
        reduced = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(reduced, operation, group)
        return reduced.tolist()
