"""All ranks fail, or none; all know what rank 0 knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from patch.distributed.collectives import all_or_none
from patch.errors import CheckpointError

_Value = TypeVar("_Value")


def from_rank_0(find: Callable[[], _Value]) -> _Value:
    """What `find` gives on rank 0, on every rank: a collective in a job; outside of one just `find`.

    Raises:
        Exception: what `find` raises, on all ranks.
    """
    if not dist.is_initialized():
        return find()
    found: list = [None]
    with all_or_none():
        if dist.get_rank() == 0:
            found = [find()]
    dist.broadcast_object_list(found, src=0)
    return found[0]


@contextmanager
def fail_together(what: str) -> Iterator[None]:
    """A block that every rank enters and whose failure on one rank is raised on all.

    Args:
        what: begins the message, such as "checkpoint X was not written".

    Raises:
        CheckpointError: on every rank, when the block raised on any.
    """
    with all_or_none():
        try:
            yield
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:  # torch's CheckpointException is a BaseException
            raise CheckpointError(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """One line, of the first failed rank where torch collected one from each."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
        return f"rank {rank}: {_reason(cause)}"
    lines = str(error).strip().splitlines() or [""]
    if "inline_container" in lines[0]:  # torch's zip writer, which does not say why
        return f"a file could not be written, the disk may be full ({lines[0]})"
    return f"{type(error).__name__}: {lines[0]}"
