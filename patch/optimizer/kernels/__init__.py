"""The Adam update on the device where the states are: chooses an implementation and tries it. See README."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from patch.compat.torch_internals import foreach_norm
from patch.errors import ConfigError
from patch.logger import get_logger
from patch.optimizer.kernels.build import BuildError
from patch.optimizer.kernels.cpp_adam import CppAdam
from patch.optimizer.kernels.numpy_adam import NumpyAdam
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

_logger = get_logger(__name__)

TRITON_CURE = "install a C compiler and Python's headers (apt install gcc python3-dev)"
"""Advice for a machine on which Triton cannot build the launcher of a kernel."""


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


def sums_of_squares(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of each of one or more parts of one device, in float64: [parts]."""
    kernel = adam_kernel(parts[0].device)
    return kernel.sums_of_squares(parts) if isinstance(kernel, CppAdam) else sums_by_norms(parts)


def sums_by_norms(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """`sums_of_squares` by torch: on a GPU in few kernels, on a CPU by a float64 copy of each part."""
    # vector_norm would make a copy on a GPU, too.
    return torch.stack(foreach_norm(list(parts), 2, dtype=torch.float64)).square()


def try_kernel(device: torch.device) -> None:
    """Update a few numbers: Triton compiles its first kernel here, and not in the midst of a step.

    Raises:
        ConfigError: it cannot, with what the machine lacks.
    """
    try:
        states = AdamStates(*torch.zeros(3, 16, device=device))
        scalars = AdamScalars(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=1)
        adam_kernel(device).update([UpdateItem(torch.zeros(16, device=device), states, scalars)])
    except Exception as error:  # noqa: BLE001 - whatever a compiler says, the cure is the same
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"no kernel can be compiled for {device}: {reason}; {TRITON_CURE}") from error
