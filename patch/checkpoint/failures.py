"""What fails while a checkpoint is written or read is a CheckpointError on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint import CheckpointException

from patch.distributed.collectives import fail_together
from patch.errors import CheckpointError

_ZIP_WRITER = "inline_container"
"""torch's source file that writes zip archives is named in its errors, which do not say the reason."""


@contextmanager
def checkpoint_failures(what: str) -> Iterator[None]:
    """A block that every rank enters and whose failure on one rank is raised on all: a collective.

    Args:
        what: begins the message, such as "checkpoint X was not written".

    Raises:
        CheckpointError: on every rank, when the block raised on any.
    """
    with fail_together(what, CheckpointError):
        try:
            yield
        except CheckpointException as error:  # no Exception, but a BaseException
            rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
            raise CheckpointError(f"{what}: rank {rank}: {_reason(cause)}") from error
        except RuntimeError as error:
            if _ZIP_WRITER not in str(error):
                raise
            raise CheckpointError(f"{what}: {_reason(error)}") from error


def _reason(error: BaseException) -> str:
    """One line of what went wrong."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    if _ZIP_WRITER in first_line:
        return f"a file could not be written, the disk may be full ({first_line})"
    return f"{type(error).__name__}: {first_line}"
