"""Formats numbers of bytes for messages."""


def size_text(num_bytes: int) -> str:
    """A size such as 1.25 GiB, or 3.20 MiB if it is below 0.01 GiB."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{num_bytes / 2**20:.2f} MiB"
