"""Dynamic loss scaling for fp16: gradients are kept away from fp16's small end.

The loss is multiplied by the scale before backward; gradients are collected in float32 and divided by it
inside the update. A step whose gradients overflow is skipped and halves the scale; a stretch of good
steps doubles it. Source: Micikevicius et al., arXiv:1710.03740.
"""

from __future__ import annotations

import torch

_FACTOR = 2.0
_SMALLEST = 1.0


class LossScale:
    """The scale of the next backward.

    Args:
        initial: first scale; 1 with `window` 0 is no scaling at all (bf16, fp32).
        window: good steps after which the scale doubles; 0: it never changes.
    """

    def __init__(self, initial: float, window: int) -> None:
        self.value = initial
        self.good_steps = 0
        self._window = window

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """What backward starts from; megatron-core's schedules ask for it (`grad_scale_func`)."""
        return loss * self.value

    @property
    def can_shrink(self) -> bool:
        """Whether an overflow can be cured by a smaller scale."""
        return self._window > 0 and self.value > _SMALLEST

    def shrink(self) -> None:
        """After a step whose gradients were not finite."""
        self.value = max(_SMALLEST, self.value / _FACTOR)
        self.good_steps = 0

    def keep(self) -> None:
        """After a good step."""
        self.good_steps += 1
        if self._window and self.good_steps % self._window == 0:
            self.value *= _FACTOR
