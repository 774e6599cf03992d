"""The messages of tensor parallelism (TP), in pieces that travel while matrix products are computed.

A piece is some rows of a matrix. Each pattern yields the pieces in the order in which to compute with them:

    GatheredRows        yields a piece when it has arrived, this rank's own first, while the next ones travel
    ScatteredSums       yields a piece that is to be computed, then sends it; this rank's own piece is last
    ReducedRows         yields a piece that is to be computed, then sums it over the ranks

A rank exchanges its pieces with one other rank after the other, so that each message has the whole link. Sums
of ScatteredSums are in the order of ranks. Without overlap each message is waited for when it has started;
everything else is the same, bits included.

Shapes: R rows that a rank owns, TP * R rows of all ranks, N columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise

import torch
import torch.distributed as dist

from patch.distributed.async_collectives import Pending, start_all_reduce, start_swap

_PIECES = 2
"""Into how many the rows of a rank are cut: with one, half of the product at TP=2 would hide no message. Over
NCCL it is one for what is gathered or scattered: half of the product takes longer than such a message."""
_LEAST_ROWS, _LEAST_BYTES = 16, 2**16
"""The least size of a piece: smaller ones are slow, and for products of few rows MKL has kernels that give
other bits."""
_IN_FLIGHT = 2
"""Messages over gloo that a gather has started before it waits for the first."""


class TensorGroup:
    """The ranks that share each layer.

    Args:
        group: megatron-core's tensor-parallel group.
        is_overlapped: whether messages travel while products are computed.
    """

    def __init__(self, group: dist.ProcessGroup, *, is_overlapped: bool) -> None:
        self.group, self.is_overlapped = group, is_overlapped
        self.rank, self.size = group.rank(), group.size()

    def start_swap(self, step: int, sent: torch.Tensor, received: torch.Tensor) -> Pending:
        """Send a tensor to the rank `step` places after this one, receive one from as many before."""
        target, source = (self.rank + step) % self.size, (self.rank - step) % self.size
        return self._started(start_swap(sent, received, self.group, target=target, source=source))

    def start_all_reduce(self, buffer: torch.Tensor) -> Pending:
        """Sum a tensor over the ranks, in place."""
        return self._started(start_all_reduce(buffer, self.group))

    def _started(self, pending: Pending) -> Pending:
        if self.is_overlapped:
            return pending
        pending.wait()
        return Pending([])

    def rows_of(self, step: int, num_rows: int) -> slice:
        """The rows of the rank `step` places after this one, if each has `num_rows`."""
        rank = (self.rank + step) % self.size
        return slice(rank * num_rows, (rank + 1) * num_rows)


class GatheredRows:
    """The rows of all ranks; creating it starts the first messages.

    Args:
        own: [R, N], contiguous, this rank's rows.
        group: the ranks.
        is_hasty: start all messages at once, for rows of which none is needed before all are there.
    """

    def __init__(self, own: torch.Tensor, group: TensorGroup, *, is_hasty: bool = False) -> None:
        num_rows = len(own)
        self._group, self._own = group, group.rows_of(0, num_rows)
        self._buffer = own.new_empty(group.size * num_rows, own.shape[1])
        self._buffer[self._own] = own
        cuts = _cut(own, 1 if own.is_cuda else _PIECES)
        self._waiting = deque((step, rows) for step in range(1, group.size) for rows in cuts)
        self._travelling: deque[tuple[slice, Pending]] = deque()
        # NCCL's messages follow each other on a stream of their own, and would wait for products before them.
        starts_all = is_hasty or own.is_cuda
        for _ in range(len(self._waiting) if starts_all else _IN_FLIGHT):
            self._start_next()

    def _start_next(self) -> None:
        if not self._waiting:
            return
        step, rows = self._waiting.popleft()
        buffer, num_rows = self._buffer, self._own.stop - self._own.start
        coming = _within(self._group.rows_of(-step, num_rows), rows)
        pending = self._group.start_swap(step, buffer[self._own][rows], buffer[coming])
        self._travelling.append((coming, pending))

    def pieces(self) -> Iterator[tuple[slice, torch.Tensor]]:
        """Each piece and its rows' place among those of all ranks; the own rows are one piece."""
        yield self._own, self._buffer[self._own]
        while self._travelling:
            place, pending = self._travelling.popleft()
            pending.wait()
            self._start_next()
            yield place, self._buffer[place]

    @property
    def num_rows(self) -> int:
        """TP * R."""
        return len(self._buffer)

    def wait(self) -> torch.Tensor:
        """[TP * R, N], when all rows have arrived, or all pieces were yielded."""
        while self._travelling:
            self._travelling.popleft()[1].wait()
            self._start_next()
        return self._buffer


class ScatteredSums:
    """Sums over the ranks, of which each rank gets its own rows.

    Args:
        product: [TP * R, N], whose rows the caller computes as `pieces` yields them.
        group: the ranks.
    """

    def __init__(self, product: torch.Tensor, group: TensorGroup) -> None:
        self._product, self._group = product, group
        self._num_rows = len(product) // group.size
        own = product[group.rows_of(0, self._num_rows)]
        self._own, self._received = own, own.new_empty(group.size - 1, *own.shape)
        self._travelling: list[Pending] = []

    def pieces(self) -> Iterator[slice]:
        """The rows to compute; what was yielded before is on its way then."""
        group, num_rows = self._group, self._num_rows
        for step in range(1, group.size):
            source = (group.rank - step) % group.size
            received = self._received[source - (source > group.rank)]
            for rows in _cut(received, 1 if received.is_cuda else _PIECES):
                place = _within(group.rows_of(step, num_rows), rows)
                yield place
                self._travelling.append(group.start_swap(step, self._product[place], received[rows]))
        yield group.rows_of(0, num_rows)

    def wait(self) -> torch.Tensor:
        """[R, N], this rank's sums, in the order of ranks."""
        for pending in self._travelling:
            pending.wait()
        total = torch.empty_like(self._own)  # memory of its own, so that the parts are freed
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


class ReducedRows:
    """Sums over the ranks, of which each rank gets all rows.

    Args:
        product: [M, N], whose rows the caller computes as `pieces` yields them; becomes the sums.
        group: the ranks.
    """

    def __init__(self, product: torch.Tensor, group: TensorGroup) -> None:
        self._product, self._group = product, group
        self._travelling: list[Pending] = []

    def pieces(self) -> Iterator[slice]:
        """The rows to compute; the sums of what was yielded before are under way then."""
        for rows in _cut(self._product, _PIECES * self._group.size):
            yield rows
            self._travelling.append(self._group.start_all_reduce(self._product[rows]))

    def wait(self) -> torch.Tensor:
        """[M, N], the sums."""
        for pending in self._travelling:
            pending.wait()
        return self._product


def _cut(matrix: torch.Tensor, most: int) -> list[slice]:
    """At most so many pieces of nearly equal numbers of rows; fewer where they would be too small."""
    num_rows = len(matrix)
    pieces = max(1, min(most, num_rows // _LEAST_ROWS, matrix.nbytes // _LEAST_BYTES))
    borders = [num_rows * index // pieces for index in range(pieces + 1)]
    return [slice(*pair) for pair in pairwise(borders)]


def _within(outer: slice, inner: slice) -> slice:
    """`inner`, which counts from the start of `outer`, as a slice of the whole."""
    return slice(outer.start + inner.start, outer.start + inner.stop)
