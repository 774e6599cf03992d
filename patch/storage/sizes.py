"""Formats numbers of bytes and counts of things for messages."""


def size_text(num_bytes: int) -> str:
    """A size such as 1.25 GiB, or 3.20 MiB if it is below 0.01 GiB."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{num_bytes / 2**20:.2f} MiB"


def counted(number: int, noun: str) -> str:
    """A count such as "1 process" or "2 processes".

    Args:
        number: how many.
        noun: in the singular.
    """
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"
