"""Dynamic loss scaling for fp16, so that small gradients do not underflow.

The loss is multiplied by the scale before backward; gradients are accumulated in float32 and divided by the
scale in the update. A step whose gradients overflow is skipped and halves the scale; a number of good steps
doubles it. Source: Micikevicius et al., arXiv:1710.03740.
"""

from __future__ import annotations

import torch

_FACTOR = 2.0
_SMALLEST = 1.0


class LossScale:
    """The scale of the next backward.

    Args:
        initial: the first scale; 1 with `window` 0 means no scaling (bf16, fp32).
        window: number of good steps after which the scale doubles; 0: it never changes.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.value = initial
        self.good_steps = 0
        self._window = window

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The scaled loss, from which backward starts: `grad_scale_func` of megatron-core's schedules."""
        return loss * self.value

    @property
    def can_shrink(self) -> bool:
        """Whether a smaller scale is possible after an overflow."""
        return self._window > 0 and self.value > _SMALLEST

    def shrink(self) -> None:
        """Halve the scale; call it after a step whose gradients were not finite."""
        self.value = max(_SMALLEST, self.value / _FACTOR)
        self.good_steps = 0

    def keep(self) -> None:
        """Count a good step, and double the scale when it is time."""
        self.good_steps += 1
        if self._window and self.good_steps % self._window == 0:
            self.value *= _FACTOR
