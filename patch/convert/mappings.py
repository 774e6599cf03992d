"""How one megatron-core parameter is made of Hugging Face tensors: one class a pattern, both directions.

A class answers one question: which stretches of the Hugging Face tensors, in which order, make up the
part of a tensor-parallel rank? Filling a parameter and taking it apart again follow from the same
answer, so the two directions cannot disagree. Values are copied, never computed with.

Sources of the layouts: megatron/core/transformer/attention.py (get_query_key_value_tensors),
megatron/core/transformer/mlp.py (glu), megatron/core/tensor_parallel/layers.py.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from patch.errors import ConversionError


class HFTensor(NamedTuple):
    """A Hugging Face tensor: its name (`*` stands for the layer number) and shape."""

    name: str
    shape: tuple[int, ...]


class Shard(NamedTuple):
    """Which of `size` equal parts: a tensor-parallel rank, or the whole as Shard(0, 1)."""

    rank: int
    size: int

    def span(self, length: int) -> tuple[int, int]:
        """First and last + 1 index of this part of `length` rows."""
        assert length % self.size == 0, f"{length} rows do not divide by TP {self.size}"
        rows = length // self.size
        return self.rank * rows, (self.rank + 1) * rows


class Segment(NamedTuple):
    """`start` to `stop` of one of a mapping's Hugging Face tensors, along the mapping's axis."""

    source: int
    start: int
    stop: int


class Block(NamedTuple):
    """A rectangle of a Hugging Face tensor: where its first element lies, and its values."""

    name: str
    row: int
    column: int
    """0 for a vector."""
    values: torch.Tensor


@dataclass(frozen=True)
class Mapping(ABC):
    """One parameter and its Hugging Face tensors; subclasses say in which order the pieces lie."""

    hf: tuple[HFTensor, ...]

    axis: ClassVar[int] = 0
    """The axis that tensor parallelism cuts and along which pieces are laid."""
    replicated: ClassVar[bool] = False
    """Whether every tensor-parallel rank holds the same whole tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        rows = sum(tensor.shape[0] for tensor in self.hf)
        return (rows, *self.hf[0].shape[1:])

    def part_shape(self, tp_size: int) -> tuple[int, ...]:
        """Of one tensor-parallel rank's part."""
        if self.replicated:
            return self.shape
        return tuple(size // tp_size if axis == self.axis else size for axis, size in enumerate(self.shape))

    @abstractmethod
    def segments(self, shard: Shard) -> list[Segment]:
        """The pieces of this shard in the order in which they lie; what is left over is padding."""

    def at_layer(self, layer: int) -> Mapping:
        """The same mapping for one layer, 0-based over the whole model."""
        named = tuple(tensor._replace(name=tensor.name.replace("*", str(layer))) for tensor in self.hf)
        return dataclasses.replace(self, hf=named)

    def fill(self, target: torch.Tensor, sources: Sequence[Any], shard: Shard) -> None:
        """Hugging Face -> MCore: copy this shard into `target`, padding with zeros.

        Args:
            target: the shard's parameter; its dtype is kept, values are rounded to nearest even.
            sources: one for each of `hf`: tensors, or safetensors slices, of which only the rows or
                columns that this shard needs are read.
        Raises:
            ConversionError: float16 cannot hold a value.
        """
        position = 0
        for index, start, stop in self.segments(shard):
            source = sources[index]
            piece = source[:, start:stop] if self.axis else source[start:stop]
            target.narrow(self.axis, position, stop - start).copy_(piece)
            position += stop - start
        target.narrow(self.axis, position, target.shape[self.axis] - position).zero_()
        self._check_range(target)

    def fill_rows(self, target: torch.Tensor, sources: Sequence[Any], start: int) -> None:
        """Copy rows `start`... of the whole parameter into `target`, padding with zeros.

        Args:
            target: as many rows as are wanted; its dtype is kept. sources: as for `fill`.
        Raises:
            ConversionError: as for `fill`.
        """
        if self.axis == 1:
            target.copy_(sources[0][start : start + target.shape[0]])
            self._check_range(target)
            return
        filled = 0
        for index, first, offset, length in self._overlaps(Shard(0, 1), start, target.shape[0]):
            target.narrow(0, offset, length).copy_(sources[index][first : first + length])
            filled = offset + length
        target[filled:].zero_()
        self._check_range(target)

    def _check_range(self, target: torch.Tensor) -> None:
        if target.dtype == torch.float16 and not target.isfinite().all():
            raise ConversionError(
                f"{' and '.join(tensor.name for tensor in self.hf)}: values beyond 65504, the largest of "
                "float16; take bf16 or fp32 (PR, --precision; --params-dtype)"
            )

    def blocks(self, part: torch.Tensor, shard: Shard, row: int = 0, column: int = 0) -> Iterator[Block]:
        """MCore -> Hugging Face: where the values of a part of a shard belong; padding belongs nowhere.

        Args:
            part: a rectangle of the shard. row, column: of its first element, counted in the shard.
        """
        begin = column if self.axis else row
        for index, first, offset, length in self._overlaps(shard, begin, part.shape[self.axis]):
            values = part.narrow(self.axis, offset, length)
            place = (row, first) if self.axis else (first, column)
            yield Block(self.hf[index].name, *place, values)

    def _overlaps(self, shard: Shard, begin: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """For each piece of the shard that meets `begin` to `begin + length` along the axis.

        Its Hugging Face tensor, the first index there, the first index counted from `begin`, the length.
        """
        position = 0
        for index, start, stop in self.segments(shard):
            first = max(position, begin)
            last = min(position + stop - start, begin + length)
            if first < last:
                yield index, start + first - position, first - begin, last - first
            position += stop - start

    def take_apart(self, shards: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """MCore -> Hugging Face: the tensors of `hf`, from the parameter's shards in rank order.

        Args:
            shards: one for each tensor-parallel rank; of a replicated parameter any one is enough.
        """
        whole = [torch.empty(tensor.shape, dtype=shards[0].dtype) for tensor in self.hf]
        for rank, shard in enumerate(shards):
            position = 0
            for index, start, stop in self.segments(Shard(rank, len(shards))):
                length = stop - start
                piece = shard.narrow(self.axis, position, length)
                whole[index].narrow(self.axis, start, length).copy_(piece)
                position += length
        return whole


class Replicated(Mapping):
    """A tensor that every tensor-parallel rank holds whole: a norm's weight."""

    replicated = True

    def segments(self, shard: Shard) -> list[Segment]:
        """All of it, whichever the shard."""
        return [Segment(0, 0, self.hf[0].shape[0])]


class Columns(Mapping):
    """A row-parallel linear layer: tensor parallelism cuts its input, the columns."""

    axis = 1

    def segments(self, shard: Shard) -> list[Segment]:
        """This rank's columns."""
        return [Segment(0, *shard.span(self.hf[0].shape[1]))]


@dataclass(frozen=True)
class PaddedRows(Mapping):
    """Embedding or output layer: rows of the vocabulary, padded at the end to `padded_rows`."""

    padded_rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, padding included."""
        return (self.padded_rows, *self.hf[0].shape[1:])

    def segments(self, shard: Shard) -> list[Segment]:
        """This rank's rows, less those that are padding."""
        start, stop = shard.span(self.padded_rows)
        rows = self.hf[0].shape[0]
        return [Segment(0, min(start, rows), min(stop, rows))]


class GatedRows(Mapping):
    """The gated MLP's first layer: a rank holds its rows of gate, then its rows of up."""

    def segments(self, shard: Shard) -> list[Segment]:
        """[gate; up] of this rank."""
        return [Segment(index, *shard.span(tensor.shape[0])) for index, tensor in enumerate(self.hf)]


@dataclass(frozen=True)
class GroupedQKV(Mapping):
    """Merged q, k, v of grouped-query attention: for each key/value group its queries, its k, its v.

    `hf` holds q [groups * queries per group * head size, H], k and v [groups * head size, H].
    """

    num_groups: int

    def segments(self, shard: Shard) -> list[Segment]:
        """[q.., k, v] of each of this rank's groups."""
        rows = [tensor.shape[0] // self.num_groups for tensor in self.hf]
        return [
            Segment(index, group * rows[index], (group + 1) * rows[index])
            for group in range(*shard.span(self.num_groups))
            for index in range(3)
        ]
