"""Formats numbers of bytes, large numbers and counts of things for messages."""


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


def scaled(number: float) -> str:
    """A number with three digits and the prefix of a unit that follows it at once, such as "8.03 G"."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:g} "


def timed(seconds: float) -> str:
    """Seconds with three digits, such as 12.3 ms; whole ones from 1000 on."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
