"""Turns errors of one rank while a checkpoint is written or read into a CheckpointError on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint import CheckpointException

from patch.distributed.collectives import fail_together
from patch.errors import CheckpointError


@contextmanager
def checkpoint_failures(what: str) -> Iterator[None]:
    """A context that every rank enters; if the block fails on one rank, all ranks raise. It is a collective.

    Args:
        what: the beginning of the message, such as "checkpoint X was not written".

    Raises:
        CheckpointError: on every rank, if the block raised on any rank.
    """
    with fail_together(what, CheckpointError):
        try:
            yield
        except CheckpointException as error:  # torch derives it from BaseException, not from Exception
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            first_line = (str(cause).strip().splitlines() or [""])[0]
            reason = f"{type(cause).__name__}: {first_line}"
            raise CheckpointError(f"{what}: rank {rank}: {reason}") from error
