"""Adam moments in fewer bytes: bf16 with stochastic rounding, and 8-bit in blocks.

bf16: a 16-bit random number is added to the float32 bits, and the upper half is kept. The random number is a
hash of the parameter's name, the element's index in the whole parameter and the step, so layout and placement
change no bit. `exp_avg` takes the lower half of the hash, `exp_avg_sq` the upper half.

8-bit: MOMENT_BLOCK neighbouring elements of a row share a scale, their largest magnitude. An element is
stored as the index of the code nearest to element * (1 / scale): the number of smaller midpoints between
neighbouring codes. A second moment never has the code of zero, because the first moment would then be
divided by epsilon alone. A block whose largest magnitude is denormal has the scale 0.

Source: the codes and blocks of bitsandbytes' 8-bit optimizers (Dettmers et al., arXiv:2110.02861), with -1
instead of -0.993, as in its blockwise quantisation on CPUs. The hash is lowbias32 of Chris Wellons'
hash-prospector, with a second key before its second product.
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
"""The dtypes of moments in memory and in files."""
KINDS = list(DTYPES.values())
"""The dtypes in the order of their numbers in adam.cpp."""

_SCALE = "_scale"


class RngCoords(NamedTuple):
    """The indices of neighbouring elements in the whole parameter, from which random numbers are computed.

    Element i has the index first + (skip + i) // row * stride + (skip + i) % row.
    """

    name: str
    """The name of the parameter, equal in every layout."""
    first: int
    """Index of the first element of this rank's part of the parameter."""
    row: int
    """Elements in a row of this part."""
    stride: int
    """Elements in a row of the whole parameter."""
    skip: int = 0
    """Elements of the part before these elements."""

    def numbers(self, step: int) -> tuple[int, ...]:
        """Return first, row, stride, skip, and the two 32-bit keys of a step."""
        hashed = hashlib.blake2b(f"{step} {self.name}".encode(), digest_size=8).digest()
        keys = int.from_bytes(hashed[:4], "little"), int.from_bytes(hashed[4:], "little")
        return self.first, self.row, self.stride, self.skip, *keys


def scale_name(moment: str) -> str:
    """Return the name of the state with the scales of an 8-bit moment."""
    return moment + _SCALE


def elements_of(state: str) -> int:
    """Return how many weights share one element of a state."""
    return MOMENT_BLOCK if state.endswith(_SCALE) else 1


def bytes_of(dtypes: Mapping[str, torch.dtype]) -> float:
    """Return the bytes of a weight's states, from their names and dtypes."""
    return sum(dtype.itemsize / elements_of(name) for name, dtype in dtypes.items())


def _decade(exponent: int, count: int) -> np.ndarray:
    """Return (count,) float64 codes up to 10 ** exponent: midpoints of equal parts of one decade."""
    middles = (np.arange(count) + 0.5) / count
    return float(f"1e{exponent}") * (0.1 + 0.9 * middles)


@cache
def magnitudes(*, signed: bool, negative: bool = False) -> np.ndarray:
    """Return ascending magnitudes of codes: 0, seven decades that each have twice the codes of the last, 1.

    Args:
        signed: magnitudes of first moments; second moments have twice as many.
        negative: magnitudes of negative first moments: one fewer, so that 256 codes are enough.
    """
    decades = [_decade(power - 6, 2**power if signed else 2 ** (power + 1)) for power in range(7)]
    found = np.concatenate([[0.0], *decades])
    return np.append(found[:-1] if negative else found, 1.0).astype(np.float32)


@cache
def codes(*, signed: bool) -> np.ndarray:
    """Return the (256,) ascending float32 values of all codes, of first (`signed`) or second moments."""
    below = -magnitudes(signed=True, negative=True)[:0:-1] if signed else np.empty(0, np.float32)
    return np.concatenate([below, magnitudes(signed=signed)])


@cache
def midpoints(*, signed: bool, negative: bool = False) -> np.ndarray:
    """Return the float32 midpoints between neighbouring `magnitudes`."""
    found = magnitudes(signed=signed, negative=negative)
    return (found[:-1] + found[1:]) / np.float32(2)


@cache
def buckets() -> np.ndarray:
    """Return (2 * 65536,) int32: encoding tables of first and second moments, by a ratio's upper 16 bits.

    The lower 8 bits of an entry are the index of the code at the bucket's beginning. The upper 16 bits are
    the lower bits of the midpoint in the bucket; for a larger ratio the index is one more. Bits are ordered
    as signed numbers, with the magnitude complemented if negative. A bucket contains at most one midpoint.
    Ratios above 1, and NaN, have the code of 1.
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
    # Below zero a larger ratio has a lower index. In a bucket with a midpoint, the index at the beginning is
    # 1 less.
    has_point = points_under < 0xFFFF
    points_under = np.where(has_point, 0xFFFE - points_under, 0xFFFF)
    squares, points_squares = table(midpoints(signed=False))
    parts = [
        (127 + above, points_above),
        (127 - under - has_point, points_under),
        *[(np.maximum(squares, 1), np.where(squares > 0, points_squares, 0xFFFF))] * 2,
    ]
    return np.concatenate([points << 16 | index for index, points in parts]).astype(np.uint32).view(np.int32)
