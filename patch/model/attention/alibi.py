"""ALiBi: scores get slope x (key position - query position), with a slope per head (arXiv:2108.12409).

A softmax ignores the query's position, which is the same for all keys of a query. So the bias depends on the
key only, and needs no tensor of scores: queries and keys get additional channels, whose products are slope x
position. Any attention kernel computes it: causal, packed, over a ring, with grouped heads or a window.

bf16, with 8 bits of precision, is too coarse for slope and position. A position is split into a multiple of
256 and the remainder, a slope into a sum of three bf16 numbers: six channels, whose products kernels sum in
float32. Near the end of a long row the rounding error of a score is that of slope x position. transformers
adds slope x position to the scores in the model's dtype.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from patch.distributed.context_group import Zigzag
from patch.model.attention.core_attention import CausalAttention

_UNIT = 256
"""Integers up to it, and its multiples up to its square, are exact with 8 bits of precision."""
_PARTS = 3


def slopes(num_heads: int) -> torch.Tensor:
    """Return the slope of each head, float32 [N], bitwise equal to transformers.

    With m heads, m the largest power of 2, the slopes are the powers of 2^(-8/m). Further heads have the odd
    powers of 2^(-4/m).
    """
    m = 2 ** math.floor(math.log2(num_heads))
    first, other = (torch.tensor(2 ** (-8 / each), dtype=torch.float32) for each in (m, 2 * m))
    powers = torch.arange(1, m + 1, dtype=torch.int32)
    others = torch.arange(1, 2 * (num_heads - m) + 1, 2, dtype=torch.int32)
    return torch.cat((first**powers, other**others))


class AlibiAttention(torch.nn.Module):
    """ALiBi around another core attention, whose class is `attention`.

    `num_channels` is `Traits.position_channels`, at least 6.
    """

    slopes: torch.Tensor

    def __init__(
        self,
        *,
        config: TransformerConfig,
        attention: type[CausalAttention],
        pg_collection: ProcessGroupCollection,
        num_channels: int,
        **arguments: Any,
    ) -> None:
        super().__init__()
        self.attention = attention(config=config, pg_collection=pg_collection, **arguments)
        self._zigzag, self._num_channels = Zigzag.of(pg_collection.cp), num_channels
        tp = pg_collection.tp
        own = slopes(config.num_attention_heads).chunk(tp.size())[tp.rank()]
        self.register_buffer("slopes", own, persistent=False)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *arguments: Any,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> torch.Tensor:
        """See CausalAttention; positions count from the start of each sequence."""
        if packed_seq_params is not None:
            positions = packed_seq_params.position_ids.t()
        else:
            whole = torch.arange(len(key) * self._zigzag.size, device=key.device)
            positions = self._zigzag.cut(whole, 0)[:, None]
        wide = (
            torch.cat((heads, channels.to(heads.dtype).expand(*heads.shape[:3], -1)), dim=-1)
            for heads, channels in ((query, self._of_heads(query)), (key, self._of_positions(positions)))
        )
        return self.attention(*wide, value, *arguments, packed_seq_params=packed_seq_params, **named)

    def _of_heads(self, query: torch.Tensor) -> torch.Tensor:
        """Return [N, channels]: three parts of each slope divided by the scale, twice, then zeros."""
        rest, parts = self.slopes / self.attention.scale, []
        for _ in range(_PARTS):
            parts.append(rest.to(query.dtype))
            rest = rest - parts[-1].float()
        return F.pad(torch.stack(parts, dim=-1).repeat(1, 2), (0, self._num_channels - 2 * _PARTS))

    def _of_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Return [s, B or 1, 1, channels]: the multiple of 256 and the remainder, each three times."""
        rest = positions % _UNIT
        parts = torch.stack((positions - rest, rest), dim=-1).repeat_interleave(_PARTS, dim=-1)
        return F.pad(parts, (0, self._num_channels - 2 * _PARTS))[:, :, None]
