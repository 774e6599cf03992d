"""Numbers out of text, and as people write them in messages.

Of what JSON and YAML parsed, `5e8` is a whole number and `true` is none.
"""

from __future__ import annotations

import math
import re

NEGATIVE = re.compile(r"-\.?\d")
"""How a negative number begins, as argparse of Python 3.14 has it: earlier ones do not know -1e-3."""
_LARGEST = 2**63 - 1
"""The largest whole number. Larger ones are no size of a tensor, and some of them no float."""


def to_int(value: object) -> int | None:
    """An int of 64 bits, or text such as 12 or 5e8 that is one; None for everything else."""
    number = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,99}", value):
        number = int(value)
    elif (real := to_float(value)) is not None and real.is_integer():
        number = int(real)
    return number if number is not None and abs(number) <= _LARGEST else None


def to_float(value: object) -> float | None:
    """A finite float, or text that is one; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # the latter for a whole number above all floats
        return None
    return number if math.isfinite(number) else None


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
