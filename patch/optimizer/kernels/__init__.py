"""The Adam update of segments of states, on whatever device they lie; see README.md."""

from patch.optimizer.kernels.dispatch import adam_kernel
from patch.optimizer.kernels.spec import AdamKernel, AdamScalars, Segment, States

__all__ = ["AdamKernel", "AdamScalars", "Segment", "States", "adam_kernel"]
