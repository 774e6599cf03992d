"""Element-wise operations of a layer, forward and backward: in Triton on CUDA, in torch elsewhere.

Both forms round at the same places, so they are bitwise equal, except Triton's exp in SwiGLU.

Shapes: S sequence, B micro-batch, G key/value heads of this rank, R query heads per group, D head size, F MLP
width. RoPE's table [2, S, B or 1, 1, D / 2] has cosines and sines in float32. They are rounded to the dtype
that they multiply, as in transformers.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch

from patch.model.kernels import plain


class LayerKernels(Protocol):
    """The operations in Triton or in torch. Results are contiguous, and only `amax` is changed in place.

    `amax`, if it is not None, must be a float32 zero []. It becomes the largest absolute value of the result.
    """

    def swiglu(self, gate_up: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
        """Return silu(gate) * up: [..., 2 F], gate before up, in; [..., F] out."""

    def swiglu_backward(
        self, gradient: torch.Tensor, gate_up: torch.Tensor, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the gradient of gate_up, from the gradient of the output."""

    def rotate(self, heads: torch.Tensor, table: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Rotate heads [S, B, heads, D] by RoPE's angles, or back (the backward)."""

    def split_qkv(
        self, mixed: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split merged QKV [S, B, G, (R + 2) D] into rotated q [S, B, G R, D], rotated k, and v."""

    def join_qkv(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """Return the gradient of merged QKV from the gradients of `split_qkv`'s q, k and v."""


def layer_kernels(is_fused: bool) -> LayerKernels:
    """Return the operations in Triton or in torch."""
    if not is_fused:
        return cast(LayerKernels, plain)
    from patch.model.kernels import fused  # only CUDA builds of torch have Triton

    return cast(LayerKernels, fused)
