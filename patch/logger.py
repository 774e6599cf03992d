"""Rank-aware logging: rank 0 speaks, the other ranks only when something is wrong.

Every module asks `get_logger(__name__)`; nothing prints. Output goes to stderr, so that stdout
stays free for results (`--dry-run` writes YAML there).
"""

import logging
import os
import sys

_ROOT = "patch"
_EVERY_RANK = f"{_ROOT}.every_rank"


def get_logger(name: str, *, every_rank: bool = False) -> logging.Logger:
    """A logger below the project's own root logger; configured by `configure_logging`.

    Args:
        every_rank: whether its messages from INFO on are shown on all ranks.
    """
    if every_rank:
        return logging.getLogger(f"{_EVERY_RANK}.{name}")
    return logging.getLogger(name if name.startswith(_ROOT) else f"{_ROOT}.{name}")


def configure_logging(rank: int | None = None) -> None:
    """Send the project's messages to stderr: from INFO on rank 0, from ERROR on the others.

    Args:
        rank: global rank of this process; read from RANK when None (0 outside a job).
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    handler = logging.StreamHandler(sys.stderr)
    prefix = "" if rank == 0 else f"[rank {rank}] "
    handler.setFormatter(logging.Formatter(prefix + "%(levelname)s %(message)s"))
    root = logging.getLogger(_ROOT)
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if rank == 0 else logging.ERROR)
    root.propagate = False
    logging.getLogger(_EVERY_RANK).setLevel(logging.INFO)
