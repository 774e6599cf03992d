"""Two defects of megatron-core's recomputation without an output (`CheckpointWithoutOutput`).

megatron/core/tensor_parallel/random.py:635-636 treats `fp8=False` as fp8 (`fp8 is not None`), and fp8 uses
names that only Transformer Engine defines (588-596): without it recomputed norms raise a NameError. With it
they ask for a GPU, and so fail on a machine without one. TransformerLayer creates such an object for each
recomputed norm (transformer_layer.py:577, 672). Delete when megatron-core reads the flag's value.

What is saved for the recomputation are detached copies of the inputs that ask for gradients
(random.py:599). Autograd keeps such a leaf together with what accumulates its gradient, and that refers to
the leaf: hooks of saved tensors can take its content away, but its memory stays (AC=offload). Saved here are
the inputs themselves; the recomputation detaches what it gets in any case (708-713). Delete when
megatron-core saves the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.tensor_parallel import random

_upstream_init = random.CheckpointWithoutOutput.__init__
_upstream_forward = random.CheckpointWithoutOutputFunction.forward


def _init(self: random.CheckpointWithoutOutput, fp8: str | bool | None = False) -> None:
    _upstream_init(self, fp8)
    self.fp8 = bool(fp8)


def _forward(
    ctx: Any, function: Callable[..., Any], recomputation: random.CheckpointWithoutOutput, *inputs: Any
) -> Any:
    outputs = _upstream_forward(ctx, function, recomputation, *inputs)
    ctx.save_for_backward(*inputs)
    return outputs


def apply() -> None:
    """Save inputs as they are, and use the value of `fp8`."""
    random.CheckpointWithoutOutputFunction.forward = staticmethod(_forward)
    random.CheckpointWithoutOutput.__init__ = _init
