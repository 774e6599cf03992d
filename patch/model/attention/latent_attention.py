"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): q, k and v come from low-rank latents.

    latents     full on every TP rank, with SP of this rank's tokens. megatron-core's local spec shards the
                latents, then gathers them, and its gradient of the shared RoPE part of the keys is that of
                one rank's heads (multi_latent_attention.py:605-611).
    heads       sharded over TP, as in other attentions
    values      narrower than queries and keys, which CausalAttention accepts

The layers, their names and the scale of the scores are megatron-core's.

Shapes: S sequence (S / TP per rank with SP), B micro-batch, N query heads of this TP rank, L latent channels.
A query or key head has D channels, of which RoPE rotates R. A value head has V channels.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from patch.model.attention.rotary_attention import TableAttention, rotate
from patch.model.hf_numerics.layers import HFLinear
from patch.model.linear import PLAIN, Column

LATENT_EPSILON = 1e-6
"""Epsilon of the latents' norms, whatever the other norms have (DeepSeek's modeling_deepseek.py)."""


class LatentAttention(TableAttention, MLASelfAttention):
    """MLASelfAttention with full latents on each TP rank; both down projections are unsharded `Linear`."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        del self.rotary_pos_emb
        self.kv_layernorm.eps = LATENT_EPSILON
        whole = [self.linear_kv_down_proj]
        if self.config.q_lora_rank is not None:
            self.q_layernorm.eps = LATENT_EPSILON
            whole.append(self.linear_q_down_proj)
        for layer in whole:
            self._prepare(layer)

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """Return the parts of our specification: megatron-core 0.19 refuses norms of latents."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Return rotated q and k [S, B, N, D], v [S, B, N, V], and no latents, from hidden states."""
        config, heads, multiply = self.config, self.num_attention_heads_per_partition, self._by(hidden_states)
        if config.q_lora_rank is None:
            query = multiply(self.linear_q_proj)
        else:
            latent = multiply(self.linear_q_down_proj)
            query, _ = self.linear_q_up_proj(self.q_layernorm(latent))
        query = query.unflatten(-1, (heads, -1))
        latent, rotary_key = multiply(self.linear_kv_down_proj).split(
            (config.kv_lora_rank, config.qk_pos_emb_head_dim), dim=-1
        )
        # The gradient of rotary_key is a sum over the heads of all TP ranks.
        if config.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key, group=self.tp_group)
        else:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key, group=self.tp_group)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent))
        key, value = key_value.unflatten(-1, (heads, -1)).split((config.qk_head_dim, config.v_head_dim), -1)
        query, rotary_query = query.split((config.qk_head_dim, config.qk_pos_emb_head_dim), dim=-1)
        turned = self._turn(rotary_key[:, :, None]).expand(-1, -1, heads, -1)
        return (
            torch.cat((query, self._turn(rotary_query)), dim=-1),
            torch.cat((key, turned), dim=-1),
            value,
            None,
            None,
        )

    def _turn(self, heads: torch.Tensor) -> torch.Tensor:
        """Rotate heads [S, B, heads, R] with interleaved pairs; the output has two halves instead."""
        assert self._table is not None, "called by forward only"
        halves = heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotate(halves, self._table, self._kernels)

    def _prepare(self, layer: Any) -> None:
        """Give a down projection, a layer of megatron-core, our product."""
        layer.forward = MethodType(_multiply, layer)

    def _by(self, hidden: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        """Return a function from a layer to its output [S, B, L]."""
        return lambda layer: layer(hidden)[0]


def _multiply(layer: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
    return PLAIN(hidden, layer.weight), None


class AlignedLatentAttention(LatentAttention):
    """LatentAttention in Hugging Face's order of operations."""

    def _prepare(self, layer: Any) -> None:
        layer.product = HFLinear()

    def _by(self, hidden: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        """Like the base, but one tensor for all layers sums gradients in transformers' order."""
        rows = hidden.transpose(0, 1).contiguous()

        def multiply(layer: Any) -> torch.Tensor:
            if isinstance(layer, Column) and self.tp_group.size() > 1:
                return layer(hidden)[0]
            return layer.product.multiply(rows, layer.weight, None).transpose(0, 1)

        return multiply

    def _turn(self, heads: torch.Tensor) -> torch.Tensor:
        assert self._table is not None, "called by forward only"
        cos, sin = self._table.to(heads.dtype).permute(0, 2, 3, 1, 4)
        pairs = heads.permute(1, 2, 0, 3)
        first, second = pairs[..., 0::2], pairs[..., 1::2]
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return turned.permute(2, 0, 1, 3)


class PolarLatentAttention(AlignedLatentAttention):
    """AlignedLatentAttention whose heads are rotated as complex float32 numbers (DeepSeek-V2)."""

    def _turn(self, heads: torch.Tensor) -> torch.Tensor:
        assert self._table is not None, "called by forward only"
        angles = torch.view_as_complex(torch.stack(tuple(self._table.permute(0, 2, 3, 1, 4)), dim=-1))
        pairs = torch.view_as_complex(heads.permute(1, 2, 0, 3).float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(3).to(heads.dtype).permute(2, 0, 1, 3)
