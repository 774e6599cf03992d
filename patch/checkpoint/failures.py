"""Turns errors of one rank while a checkpoint is written or read into a CheckpointError on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint import CheckpointException

from patch.distributed.collectives import fail_together
from patch.errors import CheckpointError

_ZIP_WRITER = "inline_container"
"""torch's source file that writes zip archives. Its errors contain this name, but not the reason."""


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
            raise CheckpointError(f"{what}: rank {rank}: {_reason(cause)}") from error
        except RuntimeError as error:
            if _ZIP_WRITER not in str(error):
                raise
            raise CheckpointError(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """The error as one line."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if _ZIP_WRITER in first_line:
        return f"a file could not be written, the disk may be full ({first_line})"
    return f"{type(error).__name__}: {first_line}"
