"""How much longer a step takes because ranks are not equally fast, and wait for the slowest of them."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple


class Spread(NamedTuple):
    """Standard deviations, as shares of a pass's time; both are assumed unless they were measured."""

    of_devices: float = 0.01
    """Between devices, the same in every pass: clocks that power and temperature limit."""
    of_passes: float = 0.01
    """Between passes of one device: the host, memory, other work."""


def slowest_of(count: int) -> float:
    """The expected maximum of independent standard normal draws, in standard deviations.

    Blom's approximation, the quantile at (n - 3/8) / (n + 1/4): within 2 % of the exact value.
    """
    return 0.0 if count == 1 else NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


def slowdown(spread: Spread, num_ranks: int, num_passes: int) -> float:
    """The factor on compute when all ranks wait for each other once in so many passes.

    A rank's n passes together have the relative deviation sqrt(d^2 + p^2 / n), d between devices and p
    between passes; the slowest of N ranks takes 1 + slowest_of(N) times as much.
    """
    deviation = math.hypot(spread.of_devices, spread.of_passes / math.sqrt(num_passes))
    return 1.0 + slowest_of(num_ranks) * deviation
