"""Numbers out of text and out of what JSON and YAML parsed: `5e8` is a whole number, `true` is none."""

from __future__ import annotations

import math
import re

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
