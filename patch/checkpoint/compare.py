"""Compares the tensors of two stored checkpoints; their layouts may differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from patch.checkpoint.inspect import plain_values, type_name
from patch.checkpoint.stored import Box, Reader, intersection, windows
from patch.errors import CheckpointError

_WINDOW_ELEMENTS = 2**20
"""Elements compared at a time; bounds the memory."""

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> dtype in which the bits are compared."""


@dataclass(frozen=True)
class TensorDifference:
    """A tensor whose shape, dtype or bits differ."""

    name: str
    first: list[int]
    second: list[int]
    """The shapes in the first and the second checkpoint."""
    dtypes: list[str]
    num_different: int
    """Different elements of the common part: by bits, or by value if the dtypes differ."""
    largest: float | None
    """Largest absolute difference in the common part, or None if only one tensor has a NaN somewhere."""


@dataclass(frozen=True)
class Comparison:
    """The comparison of two checkpoints, as plain values."""

    is_equal: bool
    """Whether all names and all bits are equal."""
    num_equal: int
    """Tensors with equal shape, dtype and bits."""
    differences: list[TensorDifference]
    only_first: list[str]
    only_second: list[str]
    common_values: list[str]
    """Names of the plain values that differ."""


def compare(first: Reader, second: Reader, advance: Callable[[int], None]) -> Comparison:
    """Compare all tensors, window by window.

    Args:
        advance: called after each window with its bytes in `first`.
    Raises:
        CheckpointError: values cannot be read.
    """
    common = sorted(first.tensors.keys() & second.tensors.keys())
    differences = [
        found for name in common if (found := _compare_tensor(name, first, second, advance)) is not None
    ]
    ours, theirs = plain_values(first.common()), plain_values(second.common())
    names = {*first.tensors, *first.objects}, {*second.tensors, *second.objects}
    return Comparison(
        is_equal=not differences and names[0] == names[1],
        num_equal=len(common) - len(differences),
        differences=differences,
        only_first=sorted(names[0] - names[1]),
        only_second=sorted(names[1] - names[0]),
        common_values=sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name)),
    )


def _compare_tensor(
    name: str, first: Reader, second: Reader, advance: Callable[[int], None]
) -> TensorDifference | None:
    ours, theirs = first.tensors[name], second.tensors[name]
    num_different, num_seen, distances = 0, 0, [0.0]
    if len(ours.shape) == len(theirs.shape):
        whole = Box((0,) * len(ours.shape), theirs.shape)
        for stored in first.boxes(name):
            num_seen += math.prod(stored.sizes)
            common = intersection(stored, whole)
            for window in windows(common, _WINDOW_ELEMENTS) if common else ():
                one, other = first.read(name, window), second.read(name, window)
                count, distance = _distance(one, other)
                num_different += count
                distances.append(distance)
                advance(one.nbytes)
        if num_seen < math.prod(ours.shape):
            raise CheckpointError(f"{first.folder}: the pieces of {name} do not cover it")
    if ours == theirs and not num_different:
        return None
    return TensorDifference(
        name,
        list(ours.shape),
        list(theirs.shape),
        [type_name(ours), type_name(theirs)],
        num_different,
        None if any(map(math.isnan, distances)) else max(distances),
    )


def _distance(one: torch.Tensor, other: torch.Tensor) -> tuple[int, float]:
    """Return the number of different elements and the largest absolute difference."""
    if one.dtype == other.dtype:
        bits = _INTEGERS.get(one.element_size(), torch.uint8)
        ours, theirs = (values.contiguous().reshape(-1).view(bits) for values in (one, other))
        if torch.equal(ours, theirs):
            return 0, 0.0
        differs = (ours != theirs).view(one.numel(), -1).any(1)
    else:
        differs = None
    x, y = one.reshape(-1).double(), other.reshape(-1).double()
    is_same = (x == y) | (x.isnan() & y.isnan())
    distances = torch.where(is_same, 0.0, (x - y).abs())
    differs = ~is_same if differs is None else differs
    return int(differs.sum()), float(distances.max()) if len(distances) else 0.0
