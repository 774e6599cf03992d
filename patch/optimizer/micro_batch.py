"""What one micro-batch is to a bucket, and to the ranks that reduce it together."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist

from patch.distributed.async_collectives import Pending, WaitClock, start_all_reduce
from patch.errors import TrainingError
from patch.optimizer.layout import BucketRange, ParamRange


class Bucket:
    """The state of one bucket within one micro-batch."""

    def __init__(
        self, index: int, bucket_range: BucketRange, shard: torch.Tensor, buffer: torch.Tensor | None
    ) -> None:
        self.index, self.range = index, bucket_range
        self.shard = shard
        """(n,) this rank's gradients; final after `GradientBuckets.finish`."""
        self.buffer = buffer
        """(shards * n,) where gradients are collected; None while no staging buffer is lent."""
        self.staging: torch.Tensor | None = None
        self.missing: set[ParamRange] = set()
        """Parameters without a gradient in the micro-batch that is open."""
        self.unknown = set(bucket_range.params)
        """Parameters that had no gradient in any micro-batch that has ended."""
        self.has_nested = self.has_repeats = False
        """Whether a gradient came from a backward inside the backward; whether a parameter got several."""
        self.is_open = self.is_due = self.is_over = self.has_left = self.is_last = False
        """Of the stage's newest micro-batch: whether it is open, reduces, has ended, is the step's last; and
        whether the bucket's reduction has started."""
        self.unwritten: set[ParamRange] = set(bucket_range.params)
        """Parameters that have given the buffer no gradient yet: their elements hold old values."""
        self.is_shard_empty = True
        self.pending: Pending | None = None
        self.is_announced = True
        """Whether nobody is to be told when the reduction under way has arrived: it is not the step's last,
        or it was told before."""
        self.round: Round | None = None

    def begin(self, is_last: bool, *, reduces: bool) -> None:
        """A micro-batch of the stage begins its backward."""
        self.missing = set(self.range.params)
        self.is_open, self.is_due, self.is_over, self.has_left = True, reduces, False, False
        self.is_last = is_last

    def end(self) -> None:
        """It has ended."""
        self.unknown &= self.missing
        self.is_open, self.is_over = False, True

    @property
    def is_ready(self) -> bool:
        """Whether the micro-batch that reduces will give no further gradient."""
        may_repeat = self.has_repeats or (self.has_nested and self.unknown)
        return self.is_due and (self.is_over or not (self.missing or may_repeat))


class Round:
    """One micro-batch's reductions of a stage at level `gradients`, which all ranks must make alike."""

    def __init__(self, stage: int, is_last: bool, group: dist.ProcessGroup, like: torch.Tensor) -> None:
        self._stage, self._group = stage, group
        self._sum = torch.full((), float(is_last), dtype=torch.float32, device=like.device)
        self._pending: Pending | None = start_all_reduce(self._sum, group)

    def check(self, clock: WaitClock) -> None:
        """Wait for the other ranks' word.

        Raises:
            TrainingError: some say that it is the step's last micro-batch, some that others follow.
        """
        if self._pending is None:
            return
        # On a stream of its own the host does not wait for what its GPU has yet to compute.
        with torch.cuda.stream(torch.cuda.Stream()) if self._sum.is_cuda else nullcontext():
            self._pending.wait(clock)
            self._pending = None
            number, size = int(self._sum.item()), self._group.size()
        if number not in (0, size):
            raise TrainingError(
                f"a micro-batch of stage {self._stage} is the step's last on {number} of {size} ranks, "
                "expected none or all: at sharding level `gradients` data-parallel ranks need equally many "
                "micro-batches. Use --data-parallel-sharding optimizer, which takes any number"
            )
