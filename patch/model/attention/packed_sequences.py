"""Packed rows: where the sequences of a row begin and end, and the position of each token.

Rows stay [S, B, ...] in every layer; only RoPE and attention know the borders. RoPE uses a token's position
within its sequence, and attention stays within a sequence. megatron-core passes `packed_seq_params` through
all layers, also recomputed ones, so every pipeline stage gets the borders of its micro-batch.

megatron-core's own packed format (`thd`) is not used for three reasons. It flattens the micro-batch, which
changes what stages send to each other. Its RoPE makes the host wait for the GPU twice per layer
(megatron/core/models/common/embeddings/rope_utils.py:182). Its attention needs Transformer Engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams

from patch.device import send
from patch.distributed.context_group import WHOLE, Zigzag


@dataclass(kw_only=True)
class PackedSequences(PackedSeqParams):
    """The packed sequences of a micro-batch of B rows of S tokens, row after row, the same on every CP rank.

    The fields `cu_seqlens_q` and `cu_seqlens_kv` (int32 [n + 1] on the device), `max_seqlen_q` and
    `max_seqlen_kv` are set, as varlen kernels need them.
    """

    lengths: list[int]
    """Tokens of each sequence, on the host."""
    position_ids: torch.Tensor
    """int64 [B, S / CP] on the device: the position of each token of this rank within its sequence."""

    @classmethod
    def of(
        cls,
        cu_seqlens: torch.Tensor | None,
        tokens: torch.Tensor,
        device: torch.device,
        zigzag: Zigzag = WHOLE,
    ) -> PackedSequences | None:
        """Return the sequences of a micro-batch, or None if each row is one sequence.

        Args:
            cu_seqlens: `Batch.cu_seqlens`, on the CPU.
            tokens: [B, S / CP]; only the shape is used.
            device: of the model.
            zigzag: this rank's part of the rows.
        """
        if cu_seqlens is None:
            return None
        lengths = cu_seqlens.diff().long()
        begins = cu_seqlens[:-1].long().repeat_interleave(lengths)
        positions = (torch.arange(len(begins)) - begins).view(len(tokens), -1)
        positions = send(zigzag.cut(positions, 1), device)
        return cls._within(send(cu_seqlens, device), lengths.tolist(), positions)

    @classmethod
    def of_rows(cls, num_rows: int, length: int, device: torch.device) -> PackedSequences:
        """Return rows of one sequence of `length` tokens each, for kernels that need packed sequences."""
        borders = torch.arange(0, (num_rows + 1) * length, length, dtype=torch.int32, device=device)
        positions = torch.arange(length, device=device).expand(num_rows, -1)
        return cls._within(borders, [length] * num_rows, positions)

    @classmethod
    def _within(
        cls, borders: torch.Tensor, lengths: list[int], position_ids: torch.Tensor
    ) -> PackedSequences:
        longest = max(lengths)
        return cls(
            qkv_format="sbhd", cu_seqlens_q=borders, cu_seqlens_kv=borders, max_seqlen_q=longest,
            max_seqlen_kv=longest, lengths=lengths, position_ids=position_ids,
        )  # fmt: skip
