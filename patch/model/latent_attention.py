"""Multi-latent attention (DeepSeek-V2, arXiv:2405.04434, 2.1): q, k and v are made from narrow latents.

    latents     whole on every rank of a TP group: upstream's local spec cuts them, then gathers them, and the
                gradient of the keys' part with RoPE, which all heads share, is that of one rank's heads
                (multi_latent_attention.py:605-611). With SP a rank has latents of its part of the tokens.
    heads       cut over TP, as in any attention
    values      narrower than queries and keys, as our attention takes them

The layers, their names and the scale of scores are upstream's.

Shapes: S sequence, with SP a rank has S / TP of it, B micro-batch, N query heads of this TP rank, D channels
of a query's and a key's head, R those that RoPE turns, V those of a value's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from patch.model.hf_order import BatchFirst
from patch.model.linear import PLAIN, Column
from patch.model.rotary_attention import TableAttention, Turn

LATENT_EPSILON = 1e-6
"""Epsilon of the latents' norms, whatever the others have (DeepSeek's modeling_deepseek.py; transformers)."""


class LatentAttention(TableAttention, MLASelfAttention):
    """MLASelfAttention of whole latents; arguments are TableAttention's.

    Both down projections are upstream's uncut `Linear`.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        del self.rotary_pos_emb
        self.kv_layernorm.eps = LATENT_EPSILON
        if self.config.q_lora_rank is not None:
            self.q_layernorm.eps = LATENT_EPSILON

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        """The parts of our specification; megatron-core 0.19's own rules refuse norms of latents."""
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}

    def get_query_key_value_tensors(
        self, hidden_states: torch.Tensor, *arguments: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None, None]:
        """Turned q and k [S, B, N, D], and v [S, B, N, V], from hidden states [S, B, H]; no latents."""
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
        # Each rank's heads have a part of its gradient.
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
        """Heads [S, B, heads, R], in which neighbours are a pair; first halves of pairs come out first."""
        assert self._table is not None, "called by forward only"
        halves = heads.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return Turn.apply(halves, self._table, self._kernels)

    def _by(self, hidden: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        """A function for the output [S, B, L] of a layer of the hidden states, which may have adapters."""

        def multiply(layer: Any) -> torch.Tensor:
            if isinstance(layer, Column):
                return layer(hidden)[0]
            latent: torch.Tensor = PLAIN(hidden, layer.weight)
            return layer.adapters(latent, hidden) if hasattr(layer, "adapters") else latent

        return multiply


class AlignedLatentAttention(LatentAttention):
    """LatentAttention in Hugging Face's order of operations: heads are turned as complex float32 numbers."""

    def _by(self, hidden: torch.Tensor) -> Callable[[Any], torch.Tensor]:
        """One tensor for all layers and their adapters adds up its gradients in transformers' order."""
        rows = hidden.transpose(0, 1).contiguous()

        def multiply(layer: Any) -> torch.Tensor:
            if isinstance(layer, Column) and self.tp_group.size() > 1:
                return layer(hidden)[0]
            product = BatchFirst(getattr(layer, "adapters", None))
            return product.multiply(rows, layer.weight, None).transpose(0, 1)

        return multiply

    def _turn(self, heads: torch.Tensor) -> torch.Tensor:
        assert self._table is not None, "called by forward only"
        angles = torch.view_as_complex(torch.stack(tuple(self._table.permute(0, 2, 3, 1, 4)), dim=-1))
        pairs = torch.view_as_complex(heads.permute(1, 2, 0, 3).float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * angles).flatten(3).to(heads.dtype).permute(2, 0, 1, 3)
