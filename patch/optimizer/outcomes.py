"""What the optimizer tells of a step, and of where its states lie."""

from __future__ import annotations

from typing import NamedTuple


class StepOutcome(NamedTuple):
    """What `step` did."""

    grad_norm: float
    """Global L2 norm of the gradients before clipping; not finite where the update was skipped."""
    is_skipped: bool
    """Whether nothing was updated, because the gradient norm is not finite."""
    is_overflow: bool
    """Whether that was an overflow of fp16: the loss scale was halved."""


class OptimizerReport(NamedTuple):
    """Where optimizer states lie on this rank, and what that costs."""

    num_chunks: int
    chunk_numel: int
    """Elements of a chunk."""
    host_bytes: int
    device_bytes: int
    """Bytes of states in host memory, and on the device."""
    offload_fraction: float
    """Share of the elements whose states are in host memory."""
    host_busy_s: float
    host_wait_s: float
    """Seconds since the start that the host updated chunks, and that somebody waited for it."""
    largest_peak: int
    """The most bytes of the device that `record_memory` ever saw."""
