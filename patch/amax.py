"""The largest absolute value of a tensor (amax), found once: a kernel notes the amax of what it writes."""

from __future__ import annotations

import math

import torch


def largest_of(matrix: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute value, float32 []; NaN is larger than any value."""
    if not matrix.numel():  # torch raises for an empty tensor
        return torch.zeros((), device=matrix.device)
    return torch.linalg.vector_norm(matrix, math.inf).float()


def note_amax(written: torch.Tensor, amax: torch.Tensor) -> None:
    """Attach the amax to the memory of a contiguous tensor, for a later cast to fewer bytes.

    The note belongs to the storage, because autograd passes the storage on under other tensor objects. A copy
    has no note. A torch operation that changes a value voids the note, except operations on `.data` or on a
    storage, which torch does not count. Tensors of `torch.inference_mode` get no note for the same reason.
    """
    if not written.is_inference():
        written.untyped_storage().amax = _numbers_of(written), amax  # type: ignore[attr-defined]


def noted_amax(matrix: torch.Tensor) -> torch.Tensor | None:
    """Return the noted amax of a tensor's values in any shape, or None if it has none or values changed."""
    numbers, amax = getattr(matrix.untyped_storage(), "amax", (None, None))
    return amax if amax is not None and numbers == _numbers_of(matrix) else None


def _numbers_of(matrix: torch.Tensor) -> tuple[object, ...]:
    where = matrix.storage_offset(), matrix.numel(), matrix.is_contiguous(), matrix.dtype
    return *where, matrix._version
