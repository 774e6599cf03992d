"""A disk that fills up while a test writes."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def disk_full_after(limit: int) -> Iterator[None]:
    """Let this process write no file longer than `limit` bytes, as on a disk that fills up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
