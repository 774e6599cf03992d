"""The flat buffer of one buffer group's parameters, here in their own dtype.

Subclasses keep parameters in another form (fp8_params.py, sharded_params.py). They define what ranks exchange
before a bucket is gathered, the data of an all-gather, and how whole parameters are made and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch.autograd.graph import increment_version

from patch.compat.torch_internals import region
from patch.distributed.async_collectives import CommHandle, WaitClock, start_all_gather
from patch.errors import TrainingError
from patch.optimizer.buckets.buffer_group import FlatLayout


class FlatParams:
    """The parameters of buffer group `number`, which become views of the buffer and keep their values."""

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        self._buffer_group, self._held, self._clock = layout.buffer_groups[number], layout.held, clock
        self._ranges = {index: r for index, r in enumerate(layout.bucket_ranges) if r.buffer_group == number}
        self._begins = {
            param.parameter: param.begin
            for bucket_range in self._ranges.values()
            for param in bucket_range.params
            if param.offset == 0  # its other parts follow without gaps
        }
        """Offset of each parameter in the buffer, by its index, in bucket order."""
        self.parameters = [layout.held.parameters[index] for index in self._begins]
        """The parameters in bucket order."""
        self._like = torch.empty(0, dtype=self._buffer_group.dtype, device=layout.held.device)
        self.buffer = self._take_over(layout.numels[number])
        """The buffer that is gathered: (numel,), in the dtype of the message."""

    @torch.no_grad()
    def _take_over(self, numel: int) -> torch.Tensor:
        """Copy the parameters to a (numel,) buffer, and make them views of it."""
        buffer = self._like.new_zeros(numel)
        for parameter, whole in self._views(buffer):
            parameter.data = whole.copy_(parameter)
        self._held.note(self.parameters)
        return buffer

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the parameters with padding, plus this rank's shards if they are separate."""
        return self.buffer.nbytes

    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's part of a bucket, (n,), which the optimizer updates."""
        return self.buffer[self._buffer_group.own(self._ranges[index])]

    def is_prepared(self, index: int) -> bool:
        """Return whether `start_gather` blocks no thread."""
        return True

    def start_gather(self, index: int) -> CommHandle | None:
        """Start the all-gather of an updated bucket; return None if there is one shard."""
        if self._buffer_group.num_shards == 1:
            return None
        with region("bucket %d all-gather", index):
            return self._start_gather(self.buffer, index)

    def _views(self, flat: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
        for parameter, begin in zip(self.parameters, self._begins.values(), strict=True):
            yield parameter, flat[begin : begin + parameter.numel()].view(parameter.shape)

    def _point(self, flat: torch.Tensor) -> None:
        for parameter, place in self._views(flat):
            parameter.data = place
        increment_version(self.parameters)
        self._held.note(self.parameters)

    def _start_gather(self, flat: torch.Tensor, index: int) -> CommHandle:
        """Gather a bucket of a buffer that already contains this rank's part."""
        bucket_range = self._ranges[index]
        whole, own = flat[bucket_range.begin : bucket_range.end], flat[self._buffer_group.own(bucket_range)]
        return start_all_gather(whole, own, self._buffer_group.shard_group)


class DetachedFlatParams(FlatParams):
    """Sharded parameters whose own shards are in separate memory.

    While parameters are whole (until the first step, and in `full_weights`), they are in a separate buffer.
    """

    form: ClassVar[str]
    """The form of parameters in training, for error messages."""

    def __init__(self, layout: FlatLayout, number: int, clock: WaitClock) -> None:
        super().__init__(layout, number, clock)
        self._whole: torch.Tensor | None = self.buffer if self.buffer.numel() else None
        self._own = self._buffer_group.new_shards(self._like, layout.numels[number])
        self.store_whole()

    def shard(self, index: int) -> torch.Tensor:
        """Return this rank's part of a bucket, (n,), which the optimizer updates."""
        return self._own[self._buffer_group.in_shards(self._ranges[index])]

    @property
    def is_whole(self) -> bool:
        """Return whether every parameter has its own dtype and all its elements."""
        return self._whole is not None

    def new_whole(self) -> torch.Tensor | None:
        """Allocate (numel,) memory for `gather_whole`, or return None if parameters are whole."""
        numel = self._own.numel() * self._buffer_group.num_shards
        return None if self.is_whole else self._like.new_empty(numel)

    @torch.no_grad()
    def gather_whole(self, whole: torch.Tensor) -> None:
        """Gather whole parameters in their own dtype from all ranks; a collective."""
        gathers = []
        for index, bucket_range in self._ranges.items():
            whole[self._buffer_group.own(bucket_range)].copy_(self.shard(index))
            gathers.append(self._start_gather(whole, index))
        for gather in gathers:
            gather.wait(self._clock)
        self._whole = whole
        self._point(whole)

    @torch.no_grad()
    def store_whole(self) -> None:
        """Keep the values of whole parameters, which are equal on all ranks."""
        if self._whole is None:
            return
        for index, bucket_range in self._ranges.items():
            self.shard(index).copy_(self._whole[self._buffer_group.own(bucket_range)])

    def leave_whole(self) -> None:
        """Keep the values of whole parameters, and return to the form for training."""
        raise NotImplementedError

    def check_whole(self) -> None:
        """Refuse to read or write parameters that are not whole, with a TrainingError."""
        if not self.is_whole:
            raise TrainingError(
                f"got weights {self.form}, expected whole ones: read and write weights within "
                "`optimizer.full_weights()`"
            )
