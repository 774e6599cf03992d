"""Parse numbers, and format numbers for messages.

In values from JSON and YAML too, `5e8` is a whole number, and `true` is not a number.
"""

from __future__ import annotations

import math
import re

NEGATIVE = re.compile(r"-\.?\d")
"""How a negative number begins, as in argparse of Python 3.14; earlier versions do not accept -1e-3."""
_LARGEST = 2**63 - 1
"""The largest whole number. Larger numbers are no size of a tensor, and some of them no float."""


def to_int(value: object) -> int | None:
    """Return a 64-bit int from a number or text such as 12 or 5e8, or None for everything else."""
    number = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,99}", value):
        number = int(value)
    elif (real := to_float(value)) is not None and real.is_integer():
        number = int(real)
    return number if number is not None and abs(number) <= _LARGEST else None


def to_float(value: object) -> float | None:
    """Return a finite float from a number or text, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):  # OverflowError: a whole number above all floats
        return None
    return number if math.isfinite(number) else None


def size_text(num_bytes: int) -> str:
    """Format a size such as 1.25 GiB, or 3.20 MiB if it is below 0.01 GiB."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.01 else f"{num_bytes / 2**20:.2f} MiB"


def counted(number: int, noun: str) -> str:
    """Format a count such as "1 process" or "2 processes", from a noun in the singular."""
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number:,} {noun}{ending}"


def scaled(number: float) -> str:
    """Format a number with three digits and a unit's prefix, such as "8.03 G"; the unit follows at once."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:g} "


def timed(seconds: float) -> str:
    """Format seconds with three digits, such as 12.3 ms; whole seconds from 1000 on."""
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
