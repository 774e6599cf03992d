"""megatron-core's self-attention with RoPE by a table of cosines and sines, computed once per micro-batch.

megatron-core computes cosines and sines for q and k in each layer and rotates by a dozen operations. It keeps
views of the merged QKV product for backward. Here one step splits and rotates the merged product, so backward
needs only attention's q, k and v. The bits are megatron-core's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core.transformer.attention import Attention, SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from torch.autograd.function import once_differentiable

from patch.model.kernels import LayerKernels, layer_kernels

_Turn = Callable[..., Any]


class Turns(NamedTuple):
    """How RoPE rotates the heads of a layer."""

    query: int | None
    """Which of RoPE's tables rotates the queries, or None if the layer has no RoPE."""
    key: int | None
    channels: int
    """The first channels of a head, which are rotated."""
    is_interleaved: bool = False
    """Whether neighboring channels are a pair. Queries and keys then get the order of halves."""


class TableAttention(Attention):
    """Mixin before an attention class: `rotary_pos_emb` is a table of `RotaryTable`."""

    def __init__(self, *arguments: Any, is_fused: bool, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._kernels = layer_kernels(is_fused)
        self._table: torch.Tensor | None = None
        """[2, S, B or 1, 1, D / 2] during forward, or None; D counts the rotated channels. Two tables have a
        first axis for them.
        """

    def forward(
        self, hidden_states: torch.Tensor, *arguments: Any, rotary_pos_emb: torch.Tensor, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run megatron-core's forward without its own RoPE."""
        self._table = rotary_pos_emb
        try:
            return super().forward(hidden_states, *arguments, **named)
        finally:
            self._table = None


class RotaryAttention(TableAttention, SelfAttention):
    """SelfAttention that splits and rotates q and k, in one step if all channels turn by one table."""

    def __init__(self, *arguments: Any, turns: Turns | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        head = self.hidden_size_per_attention_head
        self._turns = Turns(0, 0, head) if turns is None else turns
        self._has_head_norms = not isinstance(self.q_layernorm, IdentityOp | None)
        self._is_one_step = not self._has_head_norms and self._turns == (0, 0, head, False)

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rotated q [S, B, N, D], rotated k and v [S, B, G, D] from hidden states [S, B, H]."""
        assert self._table is not None, "called by forward only"
        table = self._table
        mixed, sizes = super().get_query_key_value_tensors(hidden_states, split_qkv=False)
        if self._is_one_step:
            first = table if table.ndim == 5 else table[0]
            return _ByTable.apply(mixed, first, self._kernels.split_qkv, self._kernels.join_qkv)
        # Views would keep the merged product in memory until backward.
        query, key, value = (part.contiguous() for part in mixed.split(sizes, dim=-1))
        query = query.unflatten(-1, (-1, value.shape[-1])).flatten(2, 3)
        if self._has_head_norms:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        query, key = (
            self._rotated(heads, None if number is None else table if table.ndim == 5 else table[number])
            for heads, number in ((query, self._turns.query), (key, self._turns.key))
        )
        return query, key, value

    def _rotated(self, heads: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
        """Rotate heads [S, B, heads, D] by a table, or not without one."""
        if table is None:
            return heads
        turned, rest = heads[..., : self._turns.channels], heads[..., self._turns.channels :]
        if self._turns.is_interleaved:
            turned = turned.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        turned = rotate(turned, table, self._kernels)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def rotate(heads: torch.Tensor, table: torch.Tensor, kernels: LayerKernels) -> torch.Tensor:
    """Rotate heads [S, B, heads, D] by a table; see LayerKernels."""
    turned: torch.Tensor = _ByTable.apply(
        heads, table, partial(kernels.rotate, back=False), partial(kernels.rotate, back=True)
    )
    return turned


class _ByTable(torch.autograd.Function):
    """An operation on a tensor and a table; backward needs the table alone."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, table: torch.Tensor, compute: _Turn, back: _Turn) -> Any:
        ctx.save_for_backward(table)
        ctx.back = back
        return compute(given, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (table,) = ctx.saved_tensors
        return ctx.back(*gradients, table), None, None, None
