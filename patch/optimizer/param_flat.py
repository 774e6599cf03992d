"""The flat buffer of one domain's parameters, here in their own type.

Parameters that have another form while nobody reads them are a subclass (eight_bit_flat.py, sharded_flat.py):
it says what ranks tell each other before a bucket is gathered, what travels, and how whole parameters come
and go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch.autograd.graph import increment_version

from patch.compat.torch_internals import region
from patch.distributed.async_collectives import Pending, WaitClock, start_all_gather
from patch.errors import TrainingError
from patch.optimizer.domain import FlatLayout


class ParamFlat:
    """The parameters of one domain; they become views of the buffer, values kept.

    Args:
        layout: of all parameters.
        number: of the domain.
        clock: gets the time that this thread waits for other ranks.
    """

    needs_preparation: ClassVar[bool] = False
    """Whether ranks tell each other something about whole parameters (`prepare`) before a bucket is gathered,
    so that all buckets with parts of one parameter are updated together."""

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        self._domain, self._held, self._clock = layout.domains[number], layout.held, clock
        self._ranges = {index: r for index, r in enumerate(layout.bucket_ranges) if r.domain == number}
        """The buckets of the domain, by their index."""
        self._begins = {
            param.parameter: param.begin
            for bucket_range in self._ranges.values()
            for param in bucket_range.params
            if param.offset == 0  # its other parts follow without gaps
        }
        """Where each parameter begins in the buffer, by its index, in the order of buckets."""
        self.parameters = [layout.held.parameters[index] for index in self._begins]
        """In the order of buckets."""
        self._like = torch.empty(0, dtype=self._domain.dtype, device=layout.held.device)
        self.buffer = self._take_over(layout.numels[number])
        """The buffer that is sent: (numel,), in the dtype of the message."""

    @torch.no_grad()
    def _take_over(self, numel: int) -> torch.Tensor:
        """(numel,) the values of the parameters, which become views."""
        buffer = self._like.new_zeros(numel)
        for parameter, whole in self._views(buffer):
            parameter.data = whole.copy_(parameter)
        self._held.note(self.parameters)
        return buffer

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters, padding included, and of this rank's shards where these are not views."""
        return self.buffer.nbytes

    def shard(self, index: int) -> torch.Tensor:
        """(n,) this rank's part of a bucket, which the optimizer updates."""
        begin, end = self._domain.own(self._ranges[index])
        return self.buffer[begin:end]

    def prepare(self, indices: Sequence[int]) -> None:
        """Start to tell other ranks what they need of these updated buckets, some of other domains."""

    def is_prepared(self, index: int) -> bool:
        """Whether `start_gather` makes no thread wait."""
        return True

    def start_gather(self, index: int) -> Pending | None:
        """Send this rank's part of an updated bucket, and get the others'; None: nobody else has a part."""
        if self._domain.num_shards == 1:
            return None
        with region("bucket %d all-gather", index):
            return self._start_gather(self.buffer, index)

    def new_whole(self) -> torch.Tensor | None:
        """Memory for `gather_whole`; None: parameters are whole."""
        return None

    def gather_whole(self, whole: torch.Tensor) -> None:
        """Give parameters their own type and all their elements, in this memory; a collective."""

    def store_whole(self) -> None:
        """Keep what whole parameters hold now, the same on all ranks."""

    def leave_whole(self) -> None:
        """Keep it, and give parameters the form that they train in."""

    @property
    def is_whole(self) -> bool:
        """Whether every parameter has its own type and all its elements."""
        return True

    def check_whole(self) -> None:
        """Refuse to read or write parameters that are not whole.

        Raises:
            TrainingError: they are not.
        """

    def _views(self, flat: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        """Each parameter with its place in a buffer of the domain."""
        for parameter, begin in zip(self.parameters, self._begins.values(), strict=True):
            yield parameter, flat[begin : begin + parameter.numel()].view(parameter.shape)

    def _point(self, flat: torch.Tensor) -> None:
        """Make parameters views of another buffer."""
        for parameter, place in self._views(flat):
            parameter.data = place
        increment_version(self.parameters)
        self._held.note(self.parameters)

    def _start_gather(self, flat: torch.Tensor, index: int) -> Pending:
        """Gather a bucket of a buffer, in which this rank has its own part."""
        bucket_range = self._ranges[index]
        begin, end = self._domain.own(bucket_range)
        whole = flat[bucket_range.begin : bucket_range.end]
        return start_all_gather(whole, flat[begin:end], self._domain.instance)


class ApartFlat(ParamFlat):
    """Parameters of several shards, of which a rank's own lie apart; whole until the first step.

    Whole parameters, from the construction on and while somebody reads or writes them, lie in a buffer of
    their own.
    """

    form: ClassVar[str]
    """The expected form of parameters, for errors."""

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        super().__init__(layout, number, clock)
        self._whole: torch.Tensor | None = self.buffer if self.buffer.numel() else None
        self._own = self._domain.new_shards(self._like, layout.numels[number])
        """This rank's shards, in the parameters' type."""
        self.store_whole()

    def shard(self, index: int) -> torch.Tensor:
        """(n,) this rank's part of a bucket, which the optimizer updates."""
        begin, end = self._ranges[index].begin, self._ranges[index].end
        return self._own[begin // self._domain.num_shards : end // self._domain.num_shards]

    @property
    def is_whole(self) -> bool:
        """Whether every parameter has its own type and all its elements."""
        return self._whole is not None

    def new_whole(self) -> torch.Tensor | None:
        """(numel,) memory for `gather_whole`; None: parameters are whole."""
        numel = self._own.numel() * self._domain.num_shards
        return None if self.is_whole else self._like.new_empty(numel)

    @torch.no_grad()
    def gather_whole(self, whole: torch.Tensor) -> None:
        """Give parameters their own type and all elements, gathered from all ranks; a collective."""
        gathers = []
        for index, bucket_range in self._ranges.items():
            begin, end = self._domain.own(bucket_range)
            whole[begin:end].copy_(self.shard(index))
            gathers.append(self._start_gather(whole, index))
        for gather in gathers:
            gather.wait(self._clock)
        self._whole = whole
        self._point(whole)

    @torch.no_grad()
    def store_whole(self) -> None:
        """Keep what whole parameters hold now, the same on all ranks."""
        if self._whole is None:
            return
        for index, bucket_range in self._ranges.items():
            begin, end = self._domain.own(bucket_range)
            self.shard(index).copy_(self._whole[begin:end])

    def check_whole(self) -> None:
        """Refuse to read or write parameters that are not whole.

        Raises:
            TrainingError: they are not.
        """
        if not self.is_whole:
            raise TrainingError(
                f"got weights {self.form}, expected whole ones: read and write weights within "
                "`optimizer.full_weights()`"
            )
