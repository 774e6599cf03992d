"""The Adam update, on the device where the states are; see README.md."""

from patch.optimizer.kernels.dispatch import adam_kernel
from patch.optimizer.kernels.spec import AdamKernel, AdamScalars, AdamStates, UpdateItem

__all__ = ["AdamKernel", "AdamScalars", "UpdateItem", "AdamStates", "adam_kernel"]
