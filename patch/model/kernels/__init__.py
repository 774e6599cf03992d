"""Element-wise operations of a layer, forward and backward: in Triton on CUDA, in torch elsewhere.

Both forms round at the same places, so their bits are equal, except those of Triton's exp in SwiGLU.

Shapes: S sequence, B micro-batch, G key/value heads of this rank, R query heads of each, D head size, F MLP
width. RoPE's table [2, S, B or 1, 1, D / 2] has cosines and sines in float32; they are rounded to the type
that they multiply, as transformers does.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch

from patch.model.kernels import plain


class LayerKernels(Protocol):
    """One form of the operations. No argument is changed, but `amax`; results are contiguous.

    `amax`, if it is asked for, is a float32 zero []; it becomes the largest absolute number of the result.
    """

    def swiglu(self, gate_up: torch.Tensor, amax: torch.Tensor | None = None) -> torch.Tensor:
        """silu(gate) * up: [..., 2 F], gate before up, in; [..., F] out."""

    def swiglu_backward(
        self, gradient: torch.Tensor, gate_up: torch.Tensor, amax: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The gradient of gate_up, from that of the product."""

    def rotate(self, heads: torch.Tensor, table: torch.Tensor, *, back: bool) -> torch.Tensor:
        """Heads [S, B, heads, D] turned by RoPE's angles, or turned back by them (the backward)."""

    def split_qkv(
        self, mixed: torch.Tensor, table: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Merged q, k and v [S, B, G, (R + 2) D] in; turned q [S, B, G R, D] and k, and v out."""

    def join_qkv(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, table: torch.Tensor
    ) -> torch.Tensor:
        """The backward of `split_qkv`: gradients of q, k and v in, that of the merged ones out."""


def layer_kernels(is_fused: bool) -> LayerKernels:
    """The operations in Triton, if asked for, or in torch."""
    if not is_fused:
        return cast(LayerKernels, plain)
    # Imported here, because only torch's CUDA builds come with Triton.
    from patch.model.kernels import fused

    return cast(LayerKernels, fused)
