"""Reads the small text files that a configuration depends on."""

from pathlib import Path

_MOST_BYTES = 1 << 26


def read_text(file: Path) -> str:
    """A UTF-8 file of at most 64 MiB, which may also be a pipe.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger, or no UTF-8.
    """
    with file.open("rb") as stream:
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes")
    return data.decode()
