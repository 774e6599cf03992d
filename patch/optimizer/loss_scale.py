"""Loss scaling for fp16, so that small gradients do not underflow.

The loss is multiplied by the scale before backward. Gradients are accumulated in float32 and divided by the
scale in the update. A step whose gradients overflow is skipped and halves the scale; `window` good steps
double it. Source: Micikevicius et al., arXiv:1710.03740; `hysteresis` is megatron-core's DynamicGradScaler.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from patch.config.schema import OptimizerConfig

_FACTOR = 2.0


class LossScale:
    """The scale of the next backward.

    Args:
        initial: the first scale; 1 with `window` 0 means no scaling (bf16, fp32).
        window: number of good steps after which the scale doubles, or 0 for a constant scale.
        smallest: lower bound when the scale is halved.
        hysteresis: overflows until the scale is halved, counted since it was last doubled.
    """

    def __init__(self, initial: float, window: int, *, smallest: float = 1.0, hysteresis: int = 1) -> None:
        self.value = initial
        self._state = {"good_steps": 0, "overflows_left": hysteresis}
        self._window, self._smallest, self._hysteresis = window, smallest, hysteresis

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss times the scale: `grad_scale_func` of megatron-core's schedules."""
        return loss * self.value

    @property
    def may_cure(self) -> bool:
        """Return whether skipping overflowing steps can help: the scale will still shrink, now or soon."""
        return self._window > 0 and (self.value > self._smallest or self._state["overflows_left"] > 1)

    def shrink(self) -> None:
        """Count a step with non-finite gradients, and halve the scale when the hysteresis is used up."""
        self._state["good_steps"] = 0
        self._state["overflows_left"] -= 1
        if self._state["overflows_left"] <= 0:
            self.value = max(self._smallest, self.value / _FACTOR)

    def keep(self) -> None:
        """Count a good step, and double the scale after each `window` of good steps."""
        self._state["good_steps"] += 1
        if self._window and self._state["good_steps"] % self._window == 0:
            self.value *= _FACTOR
            self._state["overflows_left"] = self._hysteresis

    def state_dict(self) -> dict[str, float]:
        """Return the state for a resume."""
        return {"value": self.value, **self._state}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Resume from the result of `state_dict`; a constant scale does not change."""
        if not self._window:
            return
        self.value = state["value"]
        self._state.update({name: int(state[name]) for name in self._state.keys() & state.keys()})


def loss_scale_of(config: OptimizerConfig, dtypes: Iterable[torch.dtype]) -> LossScale:
    """Return the scale for weights of these dtypes: 1 without fp16, otherwise the configured scale."""
    if torch.float16 not in dtypes:
        return LossScale(1.0, 0)
    if config.loss_scale is not None:
        return LossScale(config.loss_scale, 0)
    return LossScale(
        config.initial_loss_scale,
        config.loss_scale_window,
        smallest=config.min_loss_scale,
        hysteresis=config.hysteresis,
    )
