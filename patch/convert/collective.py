"""Work that can fail on one rank alone, and must then fail on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from patch.distributed.collectives import agree


@contextmanager
def all_or_none() -> Iterator[None]:
    """The body is this rank's own work; after it every rank raises when any has failed. Collective."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        failure = error
    agree(failure)
