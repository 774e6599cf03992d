"""Numbers out of text and out of what JSON and YAML parsed: `5e8` is a whole number, `true` is none."""

from __future__ import annotations

import math
import re


def to_int(value: object) -> int | None:
    """An int, or text such as 12 or 5e8 that is integral; None for everything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+", value):
        return int(value)
    number = to_float(value)
    return int(number) if number is not None and number.is_integer() else None


def to_float(value: object) -> float | None:
    """A finite float, or text that is one; None for everything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
