"""The Adam update, on the device where the states are; see README.md."""

from patch.optimizer.kernels.dispatch import TRITON_CURE, adam_kernel, sums_of_squares, try_kernel
from patch.optimizer.kernels.spec import AdamKernel, AdamScalars, AdamStates, UpdateItem

__all__ = [
    "TRITON_CURE",
    "AdamKernel",
    "AdamScalars",
    "AdamStates",
    "UpdateItem",
    "adam_kernel",
    "sums_of_squares",
    "try_kernel",
]
