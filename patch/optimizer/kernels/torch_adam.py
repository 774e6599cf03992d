"""The update in torch operations, for CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patch.optimizer.kernels.update import AdamScalars, Segment, check
from patch.optimizer.rounding import round_weights

# Elements updated at a time.
_TILE = 1 << 24


class TorchAdam:
    """The update on CUDA tensors, one operation after the other; neither shadows nor split masters."""

    @torch.no_grad()
    def update(self, segments: Sequence[Segment], scalars: AdamScalars) -> None:
        """See AdamKernel."""
        for segment in segments:
            check(segment)
            master, exp_avg, exp_avg_sq, weight = segment.states
            decay = scalars.decay(segment.is_decayed)
            tensors = (master, segment.grad, exp_avg, exp_avg_sq)
            for p, g, m, v in zip(*(tensor.split(_TILE) for tensor in tensors), strict=True):
                _update_tile(p, g, m, v, scalars, decay)
            if weight is not None:
                round_weights(master, weight)


def _update_tile(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    scalars: AdamScalars,
    decay: float,
) -> None:
    constants = torch.tensor(scalars.constants()).tolist()  # each rounded once
    scale, beta1, rest1, beta2, rest2, step_size, root_bias2, eps = constants
    # Separate in-place operations: alpha arguments, addcmul_ and addcdiv_ may fuse and round once less.
    grad = grad.float() * scale
    param.mul_(decay)
    exp_avg.mul_(beta1).add_(grad * rest1)
    exp_avg_sq.mul_(beta2).add_((grad * rest2).mul_(grad))
    denominator = exp_avg_sq.sqrt().div_(root_bias2).add_(eps)
    param.sub_((exp_avg / denominator).mul_(step_size))
