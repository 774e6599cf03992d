"""Layouts of megatron-core parameters made of Hugging Face tensors, for both directions of a conversion.

Each class has one method for its layout, `hf_slices`: the slices of the Hugging Face tensors that make up the
shard of a tensor-parallel rank, in order. Both directions use it, so they cannot disagree.

In the drawings below a letter with a number is one row: q3 is row 3 of q_proj.weight.

Sources of the layouts: megatron/core/transformer/attention.py (get_query_key_value_tensors),
megatron/core/transformer/mlp.py (glu), megatron/core/tensor_parallel/layers.py.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch

from patch.errors import ConversionError
from patch.families.weights import HFTensor


class TPShard(NamedTuple):
    """The part of a parameter on one tensor-parallel rank; TPShard(0, 1) is the whole parameter."""

    rank: int
    size: int

    def span(self, length: int) -> tuple[int, int]:
        """Return start and stop of this shard among `length` rows, columns or groups."""
        assert length % self.size == 0, f"{length} rows do not divide by TP {self.size}"
        rows = length // self.size
        return self.rank * rows, (self.rank + 1) * rows


class HFSlice(NamedTuple):
    """A slice of one of a mapping's Hugging Face tensors, along the mapping's axis."""

    tensor: int
    """Index in `WeightMapping.hf`."""
    start: int
    stop: int


class HFBlock(NamedTuple):
    """A rectangle of a Hugging Face tensor."""

    name: str
    row: int
    """Row of the first element in the whole tensor."""
    column: int
    """Column of the first element; 0 for a vector."""
    values: torch.Tensor


@dataclass(frozen=True)
class WeightMapping(ABC):
    """A parameter and the Hugging Face tensors that it is made of; subclasses define the layout.

    Args:
        hf: the Hugging Face tensors; their order is part of the layout.
        layers: numbers of the layers that have the parameter; only 0 outside of layers.
        num_experts: copies per layer, one for each expert.
        is_buffer: whether it is a float32 buffer, and no parameter.
    """

    hf: tuple[HFTensor, ...]
    layers: Sequence[int] = field(default=range(1), kw_only=True)
    num_experts: int = field(default=1, kw_only=True)
    is_buffer: bool = field(default=False, kw_only=True)

    axis: ClassVar[int] = 0
    """The axis that TP divides, and along which the slices are concatenated."""
    replicated: ClassVar[bool] = False
    """Whether every tensor-parallel rank has the whole parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole (unsharded) parameter."""
        rows = sum(tensor.shape[0] for tensor in self.hf)
        return (rows, *self.hf[0].shape[1:])

    def shard_shape(self, tp_size: int) -> tuple[int, ...]:
        """Return the shape of the shard on one of `tp_size` tensor-parallel ranks."""
        if self.replicated:
            return self.shape
        return tuple(size // tp_size if axis == self.axis else size for axis, size in enumerate(self.shape))

    @abstractmethod
    def hf_slices(self, shard: TPShard) -> list[HFSlice]:
        """Return the slices that make up this shard, in order; the rest of the shard is padding."""

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


class ReplicatedMapping(WeightMapping):
    """A tensor that is replicated on every tensor-parallel rank, such as a norm's weight.

    Hugging Face       megatron-core, any TP
    w0 w1 w2 w3   ->   w0 w1 w2 w3 on every rank
    """

    replicated = True

    def hf_slices(self, shard: TPShard) -> list[HFSlice]:
        """Return the whole tensor for every shard."""
        return [HFSlice(0, 0, self.hf[0].shape[0])]


class RowParallelMapping(WeightMapping):
    """A row-parallel linear layer (o_proj, down_proj): TP divides its input, the columns.

    Hugging Face [out, in]        megatron-core, TP 2
    a b | c d                     rank 0: a b      rank 1: c d
    e f | g h                ->           e f              g h
    """

    axis = 1

    def hf_slices(self, shard: TPShard) -> list[HFSlice]:
        """Return the columns of this rank."""
        return [HFSlice(0, *shard.span(self.hf[0].shape[1]))]


@dataclass(frozen=True)
class VocabParallelMapping(WeightMapping):
    """Embedding or output layer: rows of the vocabulary, padded at the end to `padded_vocab_size` rows.

    Hugging Face, 5 rows       megatron-core, TP 2, padded to 8 rows
    w0 w1 w2 w3 w4        ->   rank 0: w0 w1 w2 w3      rank 1: w4 0 0 0
    """

    padded_vocab_size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, padding included."""
        return (self.padded_vocab_size, *self.hf[0].shape[1:])

    def hf_slices(self, shard: TPShard) -> list[HFSlice]:
        """Return the rows of this rank, without padding."""
        start, stop = shard.span(self.padded_vocab_size)
        rows = self.hf[0].shape[0]
        return [HFSlice(0, min(start, rows), min(stop, rows))]


class ColumnParallelMapping(WeightMapping):
    """The first layer of an MLP (linear_fc1): each rank has its rows of gate, then its rows of up.

        Hugging Face            megatron-core, TP 1            megatron-core, TP 2
        gate_proj g0 g1 g2 g3   g0 g1 g2 g3 u0 u1 u2 u3   or   rank 0: g0 g1 u0 u1
        up_proj   u0 u1 u2 u3                                  rank 1: g2 g3 u2 u3

    `hf` is (gate, up), both [ffn, H]; without a gate (up,).
    """

    def hf_slices(self, shard: TPShard) -> list[HFSlice]:
        """Return [gate; up] of this rank."""
        return [HFSlice(index, *shard.span(tensor.shape[0])) for index, tensor in enumerate(self.hf)]


@dataclass(frozen=True)
class QKVMapping(WeightMapping):
    """Merged q, k, v (linear_qkv): for each key/value group its query heads, its key head and its value head.

        Hugging Face, 2 groups of 2 query heads, head size 1     megatron-core, TP 1
        q_proj q0 q1 q2 q3                                       q0 q1 k0 v0 q2 q3 k1 v1
        k_proj k0 k1                                             megatron-core, TP 2
        v_proj v0 v1                                             rank 0: q0 q1 k0 v0
                                                                 rank 1: q2 q3 k1 v1

    `hf` is (q, k, v): q is [groups * queries per group * head size, H], k and v [groups * head size, H].
    """

    num_groups: int

    def hf_slices(self, shard: TPShard) -> list[HFSlice]:
        """Return [queries, key, value] of each group of this rank."""
        rows = [tensor.shape[0] // self.num_groups for tensor in self.hf]
        return [
            HFSlice(index, group * rows[index], (group + 1) * rows[index])
            for group in range(*shard.span(self.num_groups))
            for index in range(3)
        ]


@dataclass(frozen=True)
class JoinedQKVMapping(QKVMapping):
    """QKVMapping of one tensor that has all queries, then all keys, then all values (Phi-3's qkv_proj)."""

    queries: int
    """Query heads of a group."""

    def hf_slices(self, shard: TPShard) -> list[HFSlice]:
        """Return [queries, key, value] of each group of this rank."""
        head = self.hf[0].shape[0] // (self.num_groups * (self.queries + 2))
        begins = (0, self.queries), (self.queries, 1), (self.queries + 1, 1)
        return [
            HFSlice(0, first, first + heads * head)
            for group in range(*shard.span(self.num_groups))
            for before, heads in begins
            for first in [(before * self.num_groups + group * heads) * head]
        ]


class JoinedGateUpMapping(WeightMapping):
    """ColumnParallelMapping of one tensor that has all rows of gate, then of up (Phi-3's gate_up_proj)."""

    def hf_slices(self, shard: TPShard) -> list[HFSlice]:
        """Return [gate; up] of this rank."""
        half = self.hf[0].shape[0] // 2
        start, stop = shard.span(half)
        return [HFSlice(0, start, stop), HFSlice(0, half + start, half + stop)]
