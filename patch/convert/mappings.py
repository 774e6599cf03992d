"""Layouts of megatron-core parameters made of Hugging Face tensors, for both directions of a conversion.

`WeightMapping.hf_slices` returns the slices of the Hugging Face tensors that make up the shard of a
tensor-parallel rank, in order. Both directions use it, so they cannot disagree. The layouts, by kind, where a
letter with a number is one row (q3 is row 3 of q_proj.weight):

ROW_PARALLEL      o_proj, down_proj: TP divides the columns
    a b | c d                             TP 2   rank 0: a b        rank 1: c d
    e f | g h                                            e f                g h
VOCAB_PARALLEL    embedding, output layer: rows, with padding at the end
    w0 w1 w2 w3 w4                        TP 2, padded to 8 rows   rank 0: w0 w1 w2 w3   rank 1: w4 0 0 0
COLUMN_PARALLEL   each rank has its rows of gate, then its rows of up
    gate_proj g0 g1 g2 g3                 TP 1   g0 g1 g2 g3 u0 u1 u2 u3
    up_proj   u0 u1 u2 u3                 TP 2   rank 0: g0 g1 u0 u1       rank 1: g2 g3 u2 u3
QKV               for each key/value group its query heads, its key head, its value head
    q_proj q0 q1 q2 q3                    TP 1   q0 q1 k0 v0 q2 q3 k1 v1
    k_proj k0 k1   v_proj v0 v1           TP 2   rank 0: q0 q1 k0 v0       rank 1: q2 q3 k1 v1
JOINED_QKV, JOINED_GATE_UP: the same rows from one tensor, which has its sections one after the other

Sources of the layouts: megatron/core/transformer/attention.py (get_query_key_value_tensors),
megatron/core/transformer/mlp.py (glu), megatron/core/tensor_parallel/layers.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch

from patch.errors import ConversionError
from patch.families.weights import HFTensor, Kind


class TPShard(NamedTuple):
    """The part of a parameter on one tensor-parallel rank; TPShard(0, 1) is the whole parameter."""

    rank: int
    size: int

    def span(self, length: int) -> tuple[int, int]:
        """Return start and stop of this shard among `length` rows, columns or groups."""
        assert length % self.size == 0, f"{length} rows do not divide by TP {self.size}"
        rows = length // self.size
        return self.rank * rows, (self.rank + 1) * rows


class HFBlock(NamedTuple):
    """A rectangle of a Hugging Face tensor."""

    name: str
    row: int
    """Row of the first element in the whole tensor."""
    column: int
    """Column of the first element; 0 for a vector."""
    values: torch.Tensor


@dataclass(frozen=True)
class WeightMapping:
    """A parameter and the Hugging Face tensors that it is made of."""

    kind: Kind
    hf: tuple[HFTensor, ...]
    """The Hugging Face tensors, in the order of the layout."""
    layers: Sequence[int] = range(1)
    """Numbers of the layers that have the parameter; only 0 outside of layers."""
    num_experts: int = 1
    """Copies per layer, one for each expert."""
    is_buffer: bool = False
    """Whether it is a float32 buffer, and no parameter."""
    padded_rows: int | None = None
    """Rows of the parameter with the padding of the vocabulary, or None without padding."""
    num_groups: int | None = None
    """Key/value groups of merged q, k, v, or None for other parameters."""
    joined: tuple[int, ...] = ()
    """Relative sizes of the sections of a joined tensor, such as (4, 1, 1) of q, k, v."""

    @property
    def axis(self) -> int:
        """The axis that TP divides, and along which the slices are concatenated."""
        return int(self.kind is Kind.ROW_PARALLEL)

    @property
    def replicated(self) -> bool:
        """Whether every tensor-parallel rank has the whole parameter."""
        return self.kind is Kind.REPLICATED

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole (unsharded) parameter, with padding."""
        rows = self.padded_rows or sum(tensor.shape[0] for tensor in self.hf)
        return (rows, *self.hf[0].shape[1:])

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Return the shape of the shard on one of `tp_size` tensor-parallel ranks."""
        if self.replicated:
            return self.shape
        return tuple(size // tp_size if axis == self.axis else size for axis, size in enumerate(self.shape))

    def hf_slices(self, shard: TPShard) -> Iterator[tuple[int, int, int]]:
        """Yield the slices along `axis` that make up this shard, in order: index in `hf`, start, stop.
        The rest of the shard is padding.

        Each group of rows (of a key/value group, otherwise of a rank) has its part of every section.
        """
        shard = TPShard(0, 1) if self.replicated else shard
        num_groups = self.num_groups or shard.size
        for group in range(*shard.span(num_groups)):
            for index, begin, length in self._sections():
                last = self.hf[index].shape[self.axis]
                start, stop = (begin + end for end in TPShard(group, num_groups).span(length))
                yield index, min(start, last), min(stop, last)

    def _sections(self) -> Iterator[tuple[int, int, int]]:
        """Yield index in `hf`, begin and length along `axis` of each section, such as all keys."""
        if self.joined:
            unit = self.hf[0].shape[0] // sum(self.joined)
            for before, share in zip(accumulate(self.joined, initial=0), self.joined, strict=False):
                yield 0, before * unit, share * unit
        else:
            for index, tensor in enumerate(self.hf):
                yield index, 0, self.padded_rows or tensor.shape[self.axis]

    def at(self, layer: int, expert: int = 0) -> WeightMapping:
        """Return the mapping of one layer, 0-based over the whole model, and one of its experts."""
        named = tuple(
            tensor._replace(name=tensor.name.replace("*", str(layer)).replace("#", str(expert)))
            for tensor in self.hf
        )
        return dataclasses.replace(self, hf=named)

    @property
    def copies(self) -> Iterator[tuple[int, int]]:
        """Layer and expert of each parameter with this mapping."""
        return product(self.layers, range(self.num_experts))

    def hf_to_megatron(
        self, target: torch.Tensor, sources: Sequence[Any], shard: TPShard, row: int = 0
    ) -> None:
        """Copy rows of a shard of the parameter from Hugging Face tensors; padding becomes zero.

        Args:
            target: [rows, *shard_shape[1:]]; values are rounded to its dtype, to nearest even.
            sources: for each tensor of `hf` a whole tensor, or a lazy safetensors slice, of which only these
                rows and columns are read.
            row: number of the first row in the shard.
        Raises:
            ConversionError: a value is too large for float16.
        """
        filled, wanted = 0, target.shape[self.axis]
        for index, first, offset, length in self._overlaps(shard, 0 if self.axis else row, wanted):
            part = slice(first, first + length)
            rows = sources[index][row : row + target.shape[0], part] if self.axis else sources[index][part]
            target.narrow(self.axis, offset, length).copy_(rows)
            filled = offset + length
        target.narrow(self.axis, filled, wanted - filled).zero_()
        if target.dtype == torch.float16 and not target.isfinite().all():
            raise ConversionError(
                f"{' and '.join(tensor.name for tensor in self.hf)}: values beyond 65504, the largest of "
                "float16; take bf16 or fp32 (PR, --precision; --params-dtype)"
            )

    def megatron_to_hf_blocks(
        self, part: torch.Tensor, shard: TPShard, row: int = 0, column: int = 0
    ) -> Iterator[HFBlock]:
        """Divide a part of a shard into blocks of the Hugging Face tensors, without padding.

        Args:
            part: a rectangle of the shard.
            row: row of the part's first element in the shard.
            column: column of the part's first element in the shard.
        Yields:
            the blocks, which share memory with `part`.
        """
        begin = column if self.axis else row
        for index, first, offset, length in self._overlaps(shard, begin, part.shape[self.axis]):
            values = part.narrow(self.axis, offset, length)
            block_row, block_column = (row, first) if self.axis else (first, column)
            yield HFBlock(self.hf[index].name, block_row, block_column, values)

    def _overlaps(self, shard: TPShard, begin: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """Intersect the shard's slices with `length` indices of the shard from `begin` on.
        Yield the tensor's index, the first index in that tensor, the first index from `begin`, and length.
        """
        position = 0
        for index, start, stop in self.hf_slices(shard):
            first = max(position, begin)
            last = min(position + stop - start, begin + length)
            if first < last:
                yield index, start + first - position, first - begin, last - first
            position += stop - start

    def megatron_to_hf(
        self, shards: Sequence[torch.Tensor], device: torch.device | None = None
    ) -> list[torch.Tensor]:
        """Make new Hugging Face tensors, one for each of `hf`, from all shards of the parameter.

        Args:
            shards: one for each tensor-parallel rank, in order; for a replicated parameter one is enough.
            device: the device of the result, or None for the shards' device.
        """
        dtype, device = shards[0].dtype, device or shards[0].device
        whole = {tensor.name: torch.empty(tensor.shape, dtype=dtype, device=device) for tensor in self.hf}
        for rank, shard in enumerate(shards):
            for name, row, column, values in self.megatron_to_hf_blocks(shard, TPShard(rank, len(shards))):
                begin, length = column if self.axis else row, values.shape[self.axis]
                whole[name].narrow(self.axis, begin, length).copy_(values)
        return list(whole.values())
