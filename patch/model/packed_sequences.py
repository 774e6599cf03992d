"""Several sequences in each row of a micro-batch: where they begin and end, and each token's position.

The rows stay [S, B, ...] in every layer; only two operations know of borders. RoPE gives a token the angle of
its position within its sequence, and attention stays within a sequence. Upstream passes `packed_seq_params`
through all layers, recomputed ones too, so every pipeline stage gets the borders of its micro-batch.

Upstream's own packed format (`thd`) is not used: it flattens the micro-batch, which changes what stages send
to each other, its RoPE makes the host wait for the GPU twice in each layer
(megatron/core/models/common/embeddings/rope_utils.py:182), and its attention needs Transformer Engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from patch.device import send
from patch.distributed.context_group import WHOLE, Zigzag
from patch.model.rotary import RotaryTable


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """The packed sequences of a micro-batch of B rows of S tokens, counted row after row, on every CP rank.

    Of upstream's fields `cu_seqlens_q` and `cu_seqlens_kv` (int32 [n + 1] on the device) and `max_seqlen_q`
    and `max_seqlen_kv` are set, as kernels for variable lengths take them.
    """

    lengths: list[int]
    """Tokens of each sequence, on the host."""
    position_ids: torch.Tensor
    """int64 [B, S / CP] on the device: the position within its sequence of each token of this rank."""

    @classmethod
    def of(
        cls,
        cu_seqlens: torch.Tensor | None,
        tokens: torch.Tensor,
        device: torch.device,
        zigzag: Zigzag = WHOLE,
    ) -> PackedSequences | None:
        """The sequences of a micro-batch, or None if each row is one sequence.

        Args:
            cu_seqlens: `Batch.cu_seqlens`, on the CPU.
            tokens: [B, S / CP], only the shape counts.
            device: where the model is.
            zigzag: this rank's part of the rows.
        """
        if cu_seqlens is None:
            return None
        lengths = cu_seqlens.diff().long()
        begins = cu_seqlens[:-1].long().repeat_interleave(lengths)
        positions = (torch.arange(len(begins)) - begins).view(len(tokens), -1)
        borders, longest = send(cu_seqlens, device), int(lengths.max())
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=lengths.tolist(),
            position_ids=send(zigzag.cut(positions, 1), device),
        )

    @classmethod
    def of_rows(cls, num_rows: int, length: int, device: torch.device) -> PackedSequences:
        """Rows of `length` tokens that are one sequence each, for kernels that know packed sequences only."""
        borders = torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=device)
        return cls(
            qkv_format="sbhd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=length,
            max_seqlen_kv=length,
            lengths=[length] * num_rows,
            position_ids=torch.arange(length, device=device).expand(num_rows, -1),
        )


def give_own_positions(
    decoder: torch.nn.Module, args: tuple, kwargs: dict[str, Any], *, table: RotaryTable
) -> Any:
    """A forward pre-hook of upstream's TransformerBlock: RoPE begins again in each packed sequence.

    Upstream gives the block the table of a whole row, [2, S / CP, 1, 1, D / 2]; with packed sequences it
    becomes that of each token's position within its sequence, [2, S / CP, B, 1, D / 2].
    """
    packed = kwargs["packed_seq_params"]
    if packed is None:
        return None
    return args, kwargs | {"rotary_pos_emb": table.at(packed.position_ids.t())}
