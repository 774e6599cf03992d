"""Collectives on small host values: agreement on failure, values of rank 0, sums and maxima, a barrier."""

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
    """Note of an error that all ranks of the job raise it (or another one) at the same place.

    Its handler may use collectives then. The error is returned, to be raised.
    """
    setattr(error, _MARK, True)
    return error


def is_on_all_ranks(error: Exception) -> bool:
    """Whether `on_all_ranks` noted so, or there is but one rank."""
    return getattr(error, _MARK, False) or dist.get_world_size() == 1


@contextmanager
def all_or_none() -> Iterator[None]:
    """A context for work that can fail on one rank alone (reading, writing): at its end all raise, or none.

    A collective over the whole job. Every rank enters it before the next collective, which a failed rank
    would never reach. Without a job the error is raised as it is.

    Raises:
        Exception: this rank's own error. On ranks without an error: that of the lowest rank that failed,
            named in the message, as a PatchError of the same class or, for other errors, as PatchError.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the other ranks must learn of any error
        failure = error
    if not dist.is_initialized():
        if failure is not None:
            raise failure
        return
    # Only our own classes are sent, because every rank can import them. pickle refuses a class that a library
    # creates while it runs: this rank would then fail before the collective, and the others would wait.
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
    """Like `all_or_none`, but errors of other types are raised as `error_type`.

    Args:
        what: the beginning of the message, such as "checkpoint X was not written".
        error_type: the type of error that the ranks raise.

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
            field = getattr(error, "field", None)
            raise error_type(f"{what}: {type(error).__name__}: {first_line}", field=field) from error


def from_rank_0(find: Callable[[], _Value]) -> _Value:
    """The value that `find` returns on rank 0, on every rank. Collective; without a job just calls `find`.

    Raises:
        Exception: what `find` raises, on all ranks (see `all_or_none`).
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
    """The values of all ranks, in the order of ranks: torch's collective of this name, over the whole job."""
    per_rank = [value] * dist.get_world_size()
    dist.all_gather_object(per_rank, value)
    return per_rank


def barrier(device: torch.device) -> None:
    """Wait for all ranks; over NCCL on this GPU, which torch would otherwise have to guess."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def sum_over(group: dist.ProcessGroup, values: list[float], device: torch.device) -> list[float]:
    """The sum of each value over a group, in float64, on every rank of the group.

    Args:
        group: the ranks that take part.
        values: this rank's summands.
        device: the device that the group communicates with.
    """
    return _reduce(values, device, dist.ReduceOp.SUM, group)


def max_over_world(values: list[float], device: torch.device) -> list[float]:
    """The maximum of each value over all ranks; NaN if any rank has NaN, which a plain maximum may lose."""
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
    # On another stream than compute's: the host waits for the other ranks, not for work queued on its GPU.
    with streams_of(device).stream(stream_of(device, SMALL_VALUES)):
        reduced = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(reduced, operation, group)
        return reduced.tolist()
