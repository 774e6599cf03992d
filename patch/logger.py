"""Rank-aware logging: rank 0 shows messages from INFO on, other ranks only errors.

Every module uses `get_logger(__name__)` and never `print`. Messages go to stderr, because stdout is for
results (`--dry-run` writes YAML there).
"""

import logging
import os
import sys

from patch.errors import printable

_ROOT = "patch"
_EVERY_RANK = f"{_ROOT}.every_rank"


class _Printable(logging.Formatter):
    """Formatter that escapes control characters, so that text from a file cannot act on a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        """Return the line of a record, without its traceback."""
        record.message = printable(record.message)
        return super().formatMessage(record)


def get_logger(name: str, *, every_rank: bool = False) -> logging.Logger:
    """Return a logger below the project's root logger, which `configure_logging` configures.

    Args:
        every_rank: whether to show messages from INFO on for all ranks.
    """
    if every_rank:
        return logging.getLogger(f"{_EVERY_RANK}.{name}")
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def configure_logging(rank: int | None = None) -> None:
    """Send the project's messages to stderr: from INFO on rank 0, from ERROR on other ranks.

    Args:
        rank: global rank of this process; None: the variable RANK, or 0 outside a job.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(_Printable(prefix + "%(levelname)s %(message)s"))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    root.propagate = False
    logging.getLogger(_EVERY_RANK).setLevel(logging.INFO)
