"""Gradients on their way: filled by backward, reduced bucket by bucket while backward goes on.

Levels of data-parallel sharding, in one implementation:

    none        full gradients; each bucket is all-reduced in the last micro-batch of a step
    optimizer   full gradients; each bucket is reduce-scattered in the last micro-batch (ZeRO-1)
    gradients   a rank keeps its shards only; each bucket is staged in one of a few rotating buffers and
                reduce-scattered in every micro-batch (ZeRO-2)

A bucket's reduction starts when it and all earlier buckets are full, so every rank starts the same
collectives in the same order. What unused parameters leave open is reduced, in order, when the
micro-batch ends. Where it ends is told by `watch`, not guessed from the gradients that came, so ranks
whose unused parameters differ still agree.

A rank of an interleaved pipeline has several stages. A micro-batch passes one of them at a time and concerns
only that stage's buckets; it ends where the next begins, on whichever stage.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch
import torch.distributed as dist

from patch.distributed.flat import Pending, WaitClock, start_all_reduce, start_reduce_scatter
from patch.optimizer.layout import BucketRange, Slot

# Staging buffers of level `gradients`: one filling, one travelling, one for gradients that come before
# the last of the bucket before.
NUM_STAGING = 3


class Bucket:
    """The state of one bucket within one micro-batch."""

    def __init__(
        self, index: int, extent: BucketRange, shard: torch.Tensor, buffer: torch.Tensor | None
    ) -> None:
        self.index, self.extent = index, extent
        self.shard = shard
        """(n,) this rank's gradients; final after `GradientBuckets.finish`."""
        self.buffer = buffer
        """(shards * n,) where gradients are collected; None while no staging buffer is lent."""
        self.staging: torch.Tensor | None = None
        self.missing = len(extent.slots)
        self.unwritten: set[Slot] = set(extent.slots)
        """Parameters that have given the buffer no gradient yet: their elements hold old values."""
        self.is_shard_empty = True
        self.pending: Pending | None = None
        self.is_announced = True
        """Whether nobody is to be told when the reduction under way has arrived: it is not the step's last,
        or it was told before."""


class GradientBuckets:
    """The gradients of a rank's pipeline stages.

    Args:
        parameters: the trainable ones, on one device; `extents` refer to them by index.
        extents: buckets in the order of backward.
        level: none, optimizer or gradients.
        group: data-parallel ranks (with context parallelism).
        dtype: of collecting and of reduction.
        clock: gets the time that compute waits for reductions.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        extents: list[BucketRange],
        *,
        level: str,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        clock: WaitClock,
    ) -> None:
        self._level, self._group, self._clock = level, group, clock
        self._like = torch.empty(0, dtype=dtype, device=parameters[0].device)
        # A stream can wait for what was launched, a CPU's other threads cannot.
        self._can_wait_elsewhere = group.size() == 1 or self._like.is_cuda
        self.num_shards = 1 if level == "none" else group.size()
        self._rank = 0 if level == "none" else group.rank()
        self.buckets = self._make_buckets(extents)
        self.on_backward: Callable[[], None] = lambda: None
        """Called before the first gradient of each micro-batch, or the zeros of a step that has none."""
        self.on_final: Callable[[int, Pending | None], None] = lambda index, after: None
        """Called with a bucket's index when its shard is final, or, with what it waits for, will be."""
        self.on_launch: Callable[[int], None] | None = None
        """Called with a bucket's index when its reduction starts; for tests and traces."""
        self._staging: list[torch.Tensor] = []
        self._num_staging = 0
        self._travelling: deque[Bucket] = deque()
        self.is_accumulating = False
        """Whether a micro-batch that begins is followed by others on its stage (see `no_sync`)."""
        self._reduces = self._is_last = False
        self._begun: list[Bucket] = []
        """The buckets of the stage whose micro-batch is open; of these, `_next` comes next."""
        self._next = 0
        for bucket in self.buckets:
            for slot in bucket.extent.slots:
                self._collect(parameters[slot.parameter], bucket, slot)

    def start_step(self) -> None:
        """Forget the last step's gradients, and a backward that an error ended."""
        while self._travelling:
            self._arrive(self._travelling.popleft())
        for bucket in self._begun:
            bucket.missing = len(bucket.extent.slots)
        self._begun = []
        for bucket in self.buckets:
            bucket.is_shard_empty = True
            bucket.unwritten = set(bucket.extent.slots)

    @property
    def num_bytes(self) -> int:
        """Of gradients, staging included."""
        held = [bucket.shard if bucket.buffer is None else bucket.buffer for bucket in self.buckets]
        return sum(buffer.nbytes for buffer in held) + sum(buffer.nbytes for buffer in self._staging)

    def no_sync(self) -> AbstractContextManager[None]:
        """Micro-batches before the last one: megatron-core's schedules ask for it (`no_sync_func`)."""
        return _Accumulating(self)

    def watch(self, output: torch.Tensor, stage: int) -> None:
        """Tell where a micro-batch's backward through a stage begins: at the gradient of its `output`."""
        if output.requires_grad:
            output.register_hook(partial(self._begin_micro_batch, stage))

    def flush(self) -> None:
        """End the micro-batch under way: start what reductions unused parameters have left."""
        if self._reduces:
            while self._next < len(self._begun):
                self._launch()
        for bucket in self._begun:
            bucket.missing = len(bucket.extent.slots)
        self._begun = []

    def finish(self) -> None:
        """Wait until every shard holds the sum over micro-batches and ranks."""
        self.flush()
        while self._travelling:
            self._arrive(self._travelling.popleft())
        untouched = [bucket for bucket in self.buckets if bucket.is_shard_empty]  # a step without backward
        if untouched:
            self.on_backward()
        for bucket in untouched:
            bucket.shard.zero_()

    def _make_buckets(self, extents: list[BucketRange]) -> list[Bucket]:
        """Cut the gradient memory: full buffers, or shards of accumulation alone."""
        is_sharded = self._level == "gradients"
        numel = extents[-1].end // (self.num_shards if is_sharded else 1)
        flat = self._like.new_zeros(numel)
        buckets = []
        for index, extent in enumerate(extents):
            if is_sharded:
                begin = extent.begin // self.num_shards
                shard = flat[begin : begin + extent.numel // self.num_shards]
                buckets.append(Bucket(index, extent, shard, None))
            else:
                begin, end = extent.shard(self._rank, self.num_shards)
                buckets.append(Bucket(index, extent, flat[begin:end], flat[extent.begin : extent.end]))
        return buckets

    def _collect(self, parameter: torch.nn.Parameter, bucket: Bucket, slot: Slot) -> None:
        begin, end = slot.begin - bucket.extent.begin, slot.end - bucket.extent.begin

        def on_gradient(parameter: torch.nn.Parameter) -> None:
            assert parameter.grad is not None
            assert self._begun, "a backward that `watch` was not told of"
            place = self._open(bucket)[begin:end].view(parameter.shape)
            if slot in bucket.unwritten:
                place.copy_(parameter.grad)
                bucket.unwritten.remove(slot)
            else:
                place.add_(parameter.grad)
            parameter.grad = None
            bucket.missing -= 1
            if self._reduces:
                self._launch_full()

        parameter.register_post_accumulate_grad_hook(on_gradient)

    def _begin_micro_batch(self, stage: int, gradient: torch.Tensor) -> None:
        self.flush()
        self.on_backward()
        self._is_last = not self.is_accumulating
        self._begun = [bucket for bucket in self.buckets if bucket.extent.stage == stage]
        self._next = 0
        self._reduces = self._level == "gradients" or self._is_last

    def _launch_full(self) -> None:
        while self._next < len(self._begun) and self._begun[self._next].missing == 0:
            self._launch()

    def _launch(self) -> None:
        """Start the reduction of the next bucket."""
        bucket = self._begun[self._next]
        self._next += 1
        buffer = self._open(bucket)
        for slot in bucket.unwritten:
            buffer[slot.begin - bucket.extent.begin : slot.end - bucket.extent.begin].zero_()
        if self.on_launch is not None:
            self.on_launch(bucket.index)
        if self._level == "none":
            bucket.pending = start_all_reduce(buffer, self._group)
        else:
            size = bucket.extent.numel // self.num_shards
            own = buffer[self._rank * size : (self._rank + 1) * size]
            # In place; only the first reduction of a ZeRO-2 step can write where the sum is kept.
            out = bucket.shard if self._level == "gradients" and bucket.is_shard_empty else own
            bucket.pending = start_reduce_scatter(buffer, out, self._group)
        self._travelling.append(bucket)
        bucket.is_announced = not self._is_last
        is_added_later = self._level == "gradients" and not bucket.is_shard_empty
        if self._is_last and self._can_wait_elsewhere and not is_added_later:
            bucket.is_announced = True
            self.on_final(bucket.index, bucket.pending)

    def _arrive(self, bucket: Bucket) -> None:
        """Take in a finished reduction and the staging buffer back."""
        assert bucket.pending is not None and bucket.buffer is not None
        bucket.pending.wait(self._clock)
        bucket.pending = None
        if self._level == "gradients":
            if not bucket.is_shard_empty:
                size = bucket.shard.numel()
                bucket.shard.add_(bucket.buffer[self._rank * size : (self._rank + 1) * size])
            assert bucket.staging is not None
            self._staging.append(bucket.staging)
            bucket.buffer = bucket.staging = None
        bucket.is_shard_empty = False
        if not bucket.is_announced:
            self.on_final(bucket.index, None)

    def _open(self, bucket: Bucket) -> torch.Tensor:
        """The buffer that this micro-batch's gradients of a bucket go to."""
        while bucket.pending is not None:  # the micro-batch before is still on its way
            self._arrive(self._travelling.popleft())
        if bucket.buffer is None:
            bucket.staging = self._borrow_staging()
            bucket.buffer = bucket.staging[: bucket.extent.numel]
            bucket.unwritten = set(bucket.extent.slots)
        return bucket.buffer

    def _borrow_staging(self) -> torch.Tensor:
        """A free staging buffer, a new one while few exist, or the one that comes back first."""
        if not self._staging and self._num_staging >= NUM_STAGING and self._travelling:
            self._arrive(self._travelling.popleft())
        if not self._staging:
            # Beyond NUM_STAGING only when unused parameters hold that many buckets open.
            self._num_staging += 1
            largest = max(bucket.extent.numel for bucket in self.buckets)
            self._staging.append(self._like.new_empty(largest))
        return self._staging.pop()


class _Accumulating(AbstractContextManager[None]):
    """What `no_sync` gives.

    A class, because schedules that only run forward never leave it: a generator would end by itself when it
    is collected, perhaps in the midst of a later step.
    """

    def __init__(self, gradients: GradientBuckets) -> None:
        self._gradients = gradients

    def __enter__(self) -> None:
        self._gradients.is_accumulating = True

    def __exit__(self, *error: object) -> None:
        self._gradients.is_accumulating = False
