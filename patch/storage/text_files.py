"""Reads the small text files that a configuration is read from."""

from patch.storage.places import AnyPath

_MOST_BYTES = 1 << 26


def read_text(file: AnyPath) -> str:
    """The text of a UTF-8 file or pipe of at most 64 MiB.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is larger than that, or is not UTF-8.
    """
    with file.open("rb") as stream:
        data = stream.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"more than {_MOST_BYTES} bytes")
    return data.decode()
