"""The Adam update on the device of the states: chooses a kernel and tries it; see README.md."""

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

_logger = get_logger(__name__)

TRITON_CURE = "install a C compiler and Python's headers (apt install gcc python3-dev)"
"""Advice for a machine on which Triton cannot build the launcher of a kernel."""


@cache
def adam_kernel(device: torch.device) -> AdamKernel:
    """Return the kernel for a device: Triton for CUDA, C++ for CPUs, or NumPy without a compiler."""
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
    """Return the sum of squares of each part in float64: [parts]. Needs one or more parts of one device."""
    kernel = adam_kernel(parts[0].device)
    return kernel.sums_of_squares(parts) if isinstance(kernel, CppAdam) else sums_by_norms(parts)


def sums_by_norms(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return `sums_of_squares` by torch: on a GPU in few kernels, on a CPU by a float64 copy of each part."""
    # On a GPU vector_norm would also make a copy.
    return torch.stack(foreach_norm(list(parts), 2, dtype=torch.float64)).square()


def try_kernel(device: torch.device) -> None:
    """Update a few numbers, so that Triton compiles its first kernel before the first step.

    Raises:
        ConfigError: no kernel can be compiled; the message says what the machine lacks.
    """
    try:
        states = AdamStates(*torch.zeros(3, 16, device=device))
        scalars = AdamScalars(lr=0.0, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=1)
        adam_kernel(device).update([UpdateItem(torch.zeros(16, device=device), states, scalars)])
    except Exception as error:  # noqa: BLE001 - the cure is the same for every compiler error
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"no kernel can be compiled for {device}: {reason}; {TRITON_CURE}") from error
