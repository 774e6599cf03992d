"""ALiBi: scores get slope x (key's position - query's), with a slope for each head (arXiv:2108.12409).

A query's own position is the same for all its keys, and a softmax does not see it. So the bias is that of a
key, and needs no tensor of scores: queries and keys get channels of their own, whose products are slope x
position. Any attention kernel computes it: causal, packed, over a ring, with grouped heads or a window.

A type of 8 bits of precision (bf16) is too coarse for either factor. A position is a multiple of 256 and the
rest, a slope the sum of three numbers of that type: six channels, whose products kernels add in float32.
Near the end of a long row the sum is of the size of slope x position, so scores are rounded as numbers of
that size are; transformers adds slope x position to scores in the model's type.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from patch.distributed.context_group import Zigzag
from patch.model.attention import CausalAttention

_UNIT = 256
"""Numbers below it, and its multiples below its square, are exact in 8 bits of precision."""
_PARTS = 3


def slopes(num_heads: int) -> torch.Tensor:
    """The slope of each head, float32 [N]: transformers' bits.

    The powers of 2^(-8/m) for m heads, m the largest power of 2; of the heads beyond them the odd powers of
    2^(-4/m).
    """
    m = 2 ** math.floor(math.log2(num_heads))
    first, other = (torch.tensor(2 ** (-8 / each), dtype=torch.float32) for each in (m, 2 * m))
    powers = torch.arange(1, m + 1, dtype=torch.int32)
    others = torch.arange(1, 2 * (num_heads - m) + 1, 2, dtype=torch.int32)
    return torch.cat((first**powers, other**others))


class AlibiAttention(torch.nn.Module):
    """Another core attention with ALiBi.

    Args:
        config: upstream's.
        attention: the class of the other one.
        pg_collection: `tp` and `cp` say which heads and tokens this rank has.
        num_channels: `Traits.position_channels`, at least 6.
        arguments: those of the other one.
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
        """See CausalAttention; positions are those within each sequence."""
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
        """[N, channels]: of each slope, before the scale of scores, three parts twice, and zeros."""
        rest, parts = self.slopes / self.attention.scale, []
        for _ in range(_PARTS):
            parts.append(rest.to(query.dtype))
            rest = rest - parts[-1].float()
        return F.pad(torch.stack(parts, dim=-1).repeat(1, 2), (0, self._num_channels - 2 * _PARTS))

    def _of_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """[s, B or 1, 1, channels]: three times the multiple of 256 and the rest of positions [s, B or 1]."""
        rest = positions % _UNIT
        parts = torch.stack((positions - rest, rest), dim=-1).repeat_interleave(_PARTS, dim=-1)
        return F.pad(parts, (0, self._num_channels - 2 * _PARTS))[:, :, None]
