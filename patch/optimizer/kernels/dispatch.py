"""Chooses the implementation of the update for a device."""

from __future__ import annotations

from functools import cache

import torch

from patch.logger import get_logger
from patch.optimizer.kernels.build import BuildError
from patch.optimizer.kernels.cpp_adam import CppAdam
from patch.optimizer.kernels.numpy_adam import NumpyAdam
from patch.optimizer.kernels.spec import AdamKernel

_logger = get_logger(__name__)


@cache
def adam_kernel(device: torch.device) -> AdamKernel:
    """The kernel for a device: Triton for CUDA, C++ for the CPU, NumPy for a CPU without a compiler."""
    if device.type == "cuda":
        # Imported here, because only torch's CUDA builds come with Triton.
        from patch.optimizer.kernels.triton_adam import TritonAdam

        return TritonAdam()
    try:
        return CppAdam()
    except BuildError as reason:
        _logger.warning(
            "the optimizer runs in NumPy, about 10 times slower than in C++: %s. "
            "Install g++ or clang++, or name a C++17 compiler in CXX",
            reason,
        )
        return NumpyAdam()
