"""The messages of tensor parallelism (TP), in pieces that overlap with matrix products.

A piece is a range of rows of a matrix. Each class yields the pieces in the order of computation:

    RingAllGather        yields a piece after its arrival, this rank's own piece first
    RingReduceScatter    yields a piece to compute, then sends it; this rank's own piece is last
    ChunkedAllReduce     yields a piece to compute, then all-reduces it

A rank exchanges pieces with each other rank in turn, so that each message has the whole link.
RingReduceScatter sums in rank order. Without overlap, each message is waited for right after its start; the
results are bit-identical.

Shapes: R rows that a rank owns, TP * R rows of all ranks, N columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist

from patch.distributed.async_collectives import CommHandle, start_all_reduce, start_swap

_PIECES = 2
"""Pieces per rank. With 1, half of the product at TP=2 would hide no message. Over NCCL, all-gather and
reduce-scatter use 1, because half of the product takes longer than the message."""
_LEAST_ROWS, _LEAST_BYTES = 16, 2**16
"""The least size of a piece: smaller pieces are slow, and MKL's kernels for few rows give other bits."""
_IN_FLIGHT = 2
"""Messages over gloo that an all-gather keeps in flight."""


class TensorGroup:
    """megatron-core's tensor-parallel group; `is_overlapped`: messages overlap with matrix products."""

    def __init__(self, group: dist.ProcessGroup, *, is_overlapped: bool) -> None:
        self.group, self.is_overlapped = group, is_overlapped
        self.rank, self.size = group.rank(), group.size()

    def start_swap(self, step: int, sent: torch.Tensor, received: torch.Tensor) -> CommHandle:
        """Send to the rank `step` places after this rank, and receive from the rank `step` places before."""
        return self._started(start_swap(sent, received, self.group, step))

    def start_all_reduce(self, buffer: torch.Tensor) -> CommHandle:
        """All-reduce a tensor in place."""
        return self._started(start_all_reduce(buffer, self.group))

    def _started(self, pending: CommHandle) -> CommHandle:
        if self.is_overlapped:
            return pending
        pending.wait()
        return CommHandle([])

    def rows_of(self, step: int, num_rows: int) -> slice:
        """Return the rows of the rank `step` places after this rank, with `num_rows` per rank."""
        rank = (self.rank + step) % self.size
        return slice(rank * num_rows, (rank + 1) * num_rows)


class RingAllGather:
    """An all-gather of rows; its creation starts the first messages.

    Args:
        own: [R, N], contiguous, this rank's rows.
        start_all: start all messages at once, for a caller that needs no row before all have arrived.
    """

    def __init__(self, own: torch.Tensor, group: TensorGroup, *, start_all: bool = False) -> None:
        num_rows = len(own)
        self._group, self._own = group, group.rows_of(0, num_rows)
        self._buffer = own.new_empty(group.size * num_rows, own.shape[1])
        self._buffer[self._own] = own
        cuts = _cut(own, 1 if own.is_cuda else _PIECES)
        self._waiting = deque((step, rows) for step in range(1, group.size) for rows in cuts)
        self._in_flight: deque[tuple[slice, CommHandle]] = deque()
        # NCCL's messages are queued on their own stream; later ones would wait for earlier matrix products.
        starts_all = start_all or own.is_cuda
        for _ in range(len(self._waiting) if starts_all else _IN_FLIGHT):
            self._start_next()

    def _start_next(self) -> None:
        if not self._waiting:
            return
        step, rows = self._waiting.popleft()
        buffer, num_rows = self._buffer, self._own.stop - self._own.start
        coming = _within(self._group.rows_of(-step, num_rows), rows)
        pending = self._group.start_swap(step, buffer[self._own][rows], buffer[coming])
        self._in_flight.append((coming, pending))

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield each piece with its rows' place in [TP * R]; this rank's own rows are a single piece."""
        yield self._own, self._buffer[self._own]
        while self._in_flight:
            place, pending = self._in_flight.popleft()
            pending.wait()
            self._start_next()
            yield place, self._buffer[place]

    @property
    def num_rows(self) -> int:
        """TP * R."""
        return len(self._buffer)

    def wait(self) -> torch.Tensor:
        """Wait for all rows and return them, [TP * R, N]."""
        for _ in self.pieces():
            pass
        return self._buffer


class RingReduceScatter:
    """A reduce-scatter of `product` [TP * R, N]; the caller computes its rows when `pieces` yields them."""

    def __init__(self, product: torch.Tensor, group: TensorGroup) -> None:
        self._product, self._group = product, group
        self._num_rows = len(product) // group.size
        own = product[group.rows_of(0, self._num_rows)]
        self._own, self._received = own, own.new_empty(group.size - 1, *own.shape)
        self._in_flight: list[CommHandle] = []

    def pieces(self) -> Iterator[slice]:
        """Yield the rows to compute; the previously yielded rows are then in flight."""
        group, num_rows = self._group, self._num_rows
        for step in range(1, group.size):
            source = (group.rank - step) % group.size
            received = self._received[source - (source > group.rank)]
            for rows in _cut(received, 1 if received.is_cuda else _PIECES):
                place = _within(group.rows_of(step, num_rows), rows)
                yield place
                self._in_flight.append(group.start_swap(step, self._product[place], received[rows]))
        yield group.rows_of(0, num_rows)

    def wait(self) -> torch.Tensor:
        """Return this rank's sums [R, N], summed in rank order."""
        for pending in self._in_flight:
            pending.wait()
        total = torch.empty_like(self._own)  # new memory, so that the parts can be freed
        if total.is_cuda:
            # Imported here, because only torch's CUDA builds come with Triton.
            from patch.distributed.part_sums import add_parts

            add_parts(self._received, total, own=self._own, rank=self._group.rank)
            return total
        parts = [*self._received[: self._group.rank], self._own, *self._received[self._group.rank :]]
        torch.add(*parts[:2], out=total)
        for part in parts[2:]:
            total += part
        return total


class ChunkedAllReduce:
    """An in-place all-reduce of `product` [M, N]; the caller computes its rows when `pieces` yields them."""

    def __init__(self, product: torch.Tensor, group: TensorGroup) -> None:
        self._product, self._group = product, group
        self._in_flight: list[CommHandle] = []

    def pieces(self) -> Iterator[slice]:
        """Yield the rows to compute; the all-reduce of the previously yielded rows is then in flight."""
        for rows in _cut(self._product, _PIECES * self._group.size):
            yield rows
            self._in_flight.append(self._group.start_all_reduce(self._product[rows]))

    def wait(self) -> torch.Tensor:
        """Return the sums [M, N]."""
        for pending in self._in_flight:
            pending.wait()
        return self._product


def _cut(matrix: torch.Tensor, most: int) -> list[slice]:
    """Cut rows into at most `most` nearly equal pieces; fewer if the pieces would be too small."""
    num_rows = len(matrix)
    pieces = max(1, min(most, num_rows // _LEAST_ROWS, matrix.nbytes // _LEAST_BYTES))
    borders = [num_rows * index // pieces for index in range(pieces + 1)]
    return [slice(*pair) for pair in pairwise(borders)]


def _within(outer: slice, inner: slice) -> slice:
    """Return `inner`, which is relative to the start of `outer`, as an absolute slice."""
    return slice(outer.start + inner.start, outer.start + inner.stop)
