"""Moments of Adam in fewer bytes: bf16, rounded stochastically, and 8 bits in blocks.

bf16: the upper half of the float32 bits, after a random number of 16 bits was added to them. The number is a
hash of the parameter's name, the element's index in the whole parameter and the step, so no layout and no
placement changes a bit. `exp_avg` takes the lower half of the hash, `exp_avg_sq` the upper one.

8 bits: neighbouring elements of a row, MOMENT_BLOCK of them, share a scale, their largest magnitude. An
element is the index of the code that is nearest to element * (1 / scale): the number of midpoints between
neighbouring codes that are less. A second moment never has the code of zero, as a first moment would then be
divided by epsilon alone. A block whose largest magnitude is denormal has the scale 0.

Source: the codes and blocks of bitsandbytes' 8-bit optimizers (Dettmers et al., arXiv:2110.02861), with -1
for -0.993, as in its blockwise quantisation on CPUs; the hash is lowbias32 of Chris Wellons' hash-prospector,
with a second key before its second product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from patch.config.choices import MOMENT_BLOCK, MomentType

DTYPES: dict[MomentType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}
"""How moments lie in memory and in files."""
KINDS = list(DTYPES.values())
"""Their numbers in adam.cpp."""

_SCALE = "_scale"


class Draw(NamedTuple):
    """Which elements of a whole parameter neighbouring elements are: what their random numbers depend on.

    Element i is number first + (skip + i) // row * stride + (skip + i) % row.
    """

    name: str
    """The name of the parameter, the same in every layout."""
    first: int
    """Number of the first element of this rank's part of the parameter."""
    row: int
    """Elements of a row of this part."""
    stride: int
    """Elements of a row of the whole parameter."""
    skip: int = 0
    """Elements of the part before these."""

    def numbers(self, step: int) -> tuple[int, ...]:
        """first, row, stride, skip, and the two keys of 32 bits of a step."""
        hashed = hashlib.blake2b(f"{step} {self.name}".encode(), digest_size=8).digest()
        keys = int.from_bytes(hashed[:4], "little"), int.from_bytes(hashed[4:], "little")
        return self.first, self.row, self.stride, self.skip, *keys


def scale_name(moment: str) -> str:
    """The state that has the scales of a moment in 8 bits."""
    return moment + _SCALE


def elements_of(state: str) -> int:
    """Weights that share one element of a state."""
    return MOMENT_BLOCK if state.endswith(_SCALE) else 1


def bytes_of(dtypes: Mapping[str, torch.dtype]) -> float:
    """Bytes of a weight's states, by their names and types."""
    return sum(dtype.itemsize / elements_of(name) for name, dtype in dtypes.items())


def _decade(exponent: int, count: int) -> np.ndarray:
    """(count,) codes from 10 ** (exponent - 1) to 10 ** exponent: the middles of equal parts, in float64."""
    middles = (np.arange(count) + 0.5) / count
    return float(f"1e{exponent}") * (0.1 + 0.9 * middles)


@cache
def magnitudes(*, signed: bool, negative: bool = False) -> np.ndarray:
    """Ascending magnitudes of codes: 0, seven decades of which each has twice as many as the one below, 1.

    Args:
        signed: those of first moments; else of second ones, which have twice as many.
        negative: of a first moment below zero: one less, so that 256 are enough.
    """
    decades = [_decade(power - 6, 2**power if signed else 2 ** (power + 1)) for power in range(7)]
    found = np.concatenate([[0.0], *decades])
    return np.append(found[:-1] if negative else found, 1.0).astype(np.float32)


@cache
def codes(*, signed: bool) -> np.ndarray:
    """(256,) the ascending float32 values of all codes, of first (`signed`) or second moments."""
    below = -magnitudes(signed=True, negative=True)[:0:-1] if signed else np.empty(0, np.float32)
    return np.concatenate([below, magnitudes(signed=signed)])


@cache
def midpoints(*, signed: bool, negative: bool = False) -> np.ndarray:
    """float32 values halfway between neighbouring `magnitudes`."""
    found = magnitudes(signed=signed, negative=negative)
    return (found[:-1] + found[1:]) / np.float32(2)


@cache
def buckets() -> np.ndarray:
    """(2 * 65536,) int32: what encodes first moments, then second ones, by the upper 16 bits of their ratio.

    The lower 8 bits are the index of the code at the bucket's beginning, in the order of bits as signed
    numbers whose magnitude is complemented if they are negative; the upper 16 are the lower bits of the
    midpoint inside, above which it is one more. At most one midpoint lies in a bucket. Ratios above 1, and
    NaN, have the code of 1.
    """
    begins = np.arange(0x8000, dtype=np.int64) << 16

    def table(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        bits = points.view(np.int32).astype(np.int64)
        below, within = np.searchsorted(bits, begins), np.searchsorted(bits, begins + 0xFFFF, side="right")
        assert (within - below).max() <= 1, "two midpoints in a bucket"
        inside = bits[np.minimum(below, len(bits) - 1)] & 0xFFFF
        return below, np.where(within > below, inside, 0xFFFF)

    above, points_above = table(midpoints(signed=True))
    under, points_under = table(midpoints(signed=True, negative=True))
    # Below zero a larger ratio has the lower index: one that passes no midpoint is one above.
    has_point = points_under < 0xFFFF
    points_under = np.where(has_point, 0xFFFE - points_under, 0xFFFF)
    squares, points_squares = table(midpoints(signed=False))
    parts = [
        (127 + above, points_above),
        (127 - under - has_point, points_under),
        *[(np.maximum(squares, 1), np.where(squares > 0, points_squares, 0xFFFF))] * 2,
    ]
    return np.concatenate([points << 16 | index for index, points in parts]).astype(np.uint32).view(np.int32)
