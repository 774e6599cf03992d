"""One AdamW update in one written order of float32 operations, and its NumPy oracle.

    g = grad * scale
    p = p * (1 - lr * weight_decay)
    m = m * beta1 + g * (1 - beta1)
    v = v * beta2 + (g * (1 - beta2)) * g
    p = p - (lr / bias1) * (m / (sqrt(v) / sqrt(bias2) + eps))        bias_i = 1 - beta_i ** step

Every product, sum, quotient and root is one IEEE float32 operation, none fused; scalars are computed
in float64 and rounded once. Whoever follows this order gets the same bits, wherever the states lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class AdamWScalars:
    """What one update needs besides the tensors; `step` counts updates from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float = 1.0

    def rounded(self) -> tuple[float, ...]:
        """decay, beta1, 1 - beta1, beta2, 1 - beta2, step size, root of bias2: each rounded once."""
        bias1, bias2 = 1.0 - self.beta1**self.step, 1.0 - self.beta2**self.step
        return tuple(
            float(np.float32(value))
            for value in (
                1.0 - self.lr * self.weight_decay,
                self.beta1,
                1.0 - self.beta1,
                self.beta2,
                1.0 - self.beta2,
                self.lr / bias1,
                math.sqrt(bias2),
            )
        )


# Elements updated at a time: small enough that temporaries stay in a core's cache, or cost a GPU little.
_CPU_TILE, _CUDA_TILE = 1 << 16, 1 << 24


@torch.no_grad()
def adamw_update(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: AdamWScalars,
) -> None:
    """Update `param`, `exp_avg` and `exp_avg_sq` in place.

    Args:
        param, grad, exp_avg, exp_avg_sq: (numel,) float32, contiguous, one device; `grad` may be
            bfloat16, and is not changed.
        scalars: of this step.
    Source: Loshchilov & Hutter, arXiv:1711.05101, algorithm 2.
    """
    tile = _CUDA_TILE if param.is_cuda else _CPU_TILE
    tensors = (param, grad, exp_avg, exp_avg_sq)
    for p, g, m, v in zip(*(tensor.split(tile) for tensor in tensors), strict=True):
        _update_tile(p, g, m, v, scalars)


def _update_tile(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: AdamWScalars,
) -> None:
    decay, beta1, rest1, beta2, rest2, step_size, root_bias2 = scalars.rounded()
    # Separate in-place operations: alpha arguments, addcmul_ and addcdiv_ may fuse and round once less.
    grad = grad.float() * scalars.grad_scale
    param.mul_(decay)
    exp_avg.mul_(beta1).add_(grad * rest1)
    exp_avg_sq.mul_(beta2).add_((grad * rest2).mul_(grad))
    denominator = _sqrt(exp_avg_sq).div_(root_bias2).add_(scalars.eps)
    param.sub_((exp_avg / denominator).mul_(step_size))


def _sqrt(values: torch.Tensor) -> torch.Tensor:
    # torch's vectorised CPU square root is not correctly rounded; NumPy's and CUDA's are.
    if values.is_cuda:
        return values.sqrt()
    return torch.from_numpy(np.sqrt(values.numpy()))


def adamw_update_numpy(
    param: np.ndarray, grad: np.ndarray, exp_avg: np.ndarray, exp_avg_sq: np.ndarray, scalars: AdamWScalars
) -> None:
    """The oracle: the same update on float32 arrays, as plainly as it can be written."""
    decay, beta1, rest1, beta2, rest2, step_size, root_bias2 = map(np.float32, scalars.rounded())
    g = grad * np.float32(scalars.grad_scale)
    param[:] = param * decay
    exp_avg[:] = exp_avg * beta1 + g * rest1
    exp_avg_sq[:] = exp_avg_sq * beta2 + (g * rest2) * g
    param[:] = param - step_size * (exp_avg / (np.sqrt(exp_avg_sq) / root_bias2 + np.float32(scalars.eps)))
