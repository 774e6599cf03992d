"""Upstream's self-attention with RoPE by a table of cosines and sines, made once a micro-batch.

Upstream computes cosines and sines of the same positions for q and k in each layer, turns each by a dozen
operations, and keeps views of the merged product of q, k and v for backward. Here the merged product is split
and turned in one step, so backward needs none of it but q, k and v for attention. The bits are upstream's.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch.autograd.function import once_differentiable

from patch.model.kernels import LayerKernels, layer_kernels


class TableAttention(Attention):
    """Before one of upstream's attentions: its `rotary_pos_emb` is a table of `RotaryTable`.

    Args:
        is_fused: whether RoPE is a Triton kernel.
        arguments, named: those of upstream's.
    """

    def __init__(self, *arguments: Any, is_fused: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._kernels = layer_kernels(is_fused)
        self._table: torch.Tensor | None = None
        """[2, S, B or 1, 1, D / 2], during forward; D are the channels that turn."""

    def forward(
        self, hidden_states: torch.Tensor, *arguments: Any, rotary_pos_emb: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Upstream's forward, whose own RoPE is skipped."""
        self._table = rotary_pos_emb
        try:
            return super().forward(hidden_states, *arguments, **named)
        finally:
            self._table = None


class RotaryAttention(TableAttention, SelfAttention):
    """SelfAttention whose q and k are split off and turned in one step; arguments are TableAttention's."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._has_head_norms = not isinstance(self.q_layernorm, IdentityOp | None)

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Turned q [S, B, N, D] and k [S, B, G, D], and v [S, B, G, D], from hidden states [S, B, H]."""
        assert self._table is not None, "called by forward only"
        if self._has_head_norms:  # they are between the split and the turn
            query, key, value = super().get_query_key_value_tensors(hidden_states)
            query, key = (Turn.apply(heads, self._table, self._kernels) for heads in (query, key))
            return query, key, value
        mixed, _ = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
        return _SplitAndTurn.apply(mixed, self._table, self._kernels)


class Turn(torch.autograd.Function):
    """Heads [S, B, heads, D], turned by a table."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, table: torch.Tensor, kernels: LayerKernels) -> torch.Tensor:
        """See LayerKernels."""
        ctx.save_for_backward(table)
        ctx.kernels = kernels
        return kernels.rotate(heads, table, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """The gradient, turned back."""
        (table,) = ctx.saved_tensors
        return ctx.kernels.rotate(gradient, table, back=True), None, None


class _SplitAndTurn(torch.autograd.Function):
    """Merged q, k and v [S, B, G, (R + 2) D]."""

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, table: torch.Tensor, kernels: LayerKernels
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(table)
        ctx.kernels = kernels
        return kernels.split_qkv(mixed, table)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        (table,) = ctx.saved_tensors
        return ctx.kernels.join_qkv(query, key, value, table), None, None
