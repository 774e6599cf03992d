"""Gradients on their way: filled by backward, reduced bucket by bucket while backward goes on.

Levels of data-parallel sharding, in one implementation:

    none        full gradients; each bucket is all-reduced in the last micro-batch of a step
    optimizer   full gradients; each bucket is reduce-scattered in the last micro-batch (ZeRO-1)
    gradients   a rank keeps its shards only; each bucket is staged in one of a few rotating buffers and
                reduce-scattered in every micro-batch (ZeRO-2)

A bucket's reduction starts when it and all earlier buckets are full, so every rank starts the same
collectives in the same order. What unused parameters leave open is reduced, in order, when the
micro-batch ends. Where it ends is told by `watch`, not guessed from the gradients that came, so ranks
whose unused parameters differ still agree. A stage whose last micro-batch was not seen when the step ends
is reduced then, with what came before. At level `gradients` every micro-batch reduces, so ranks must have
equally many: with each they sum up who calls it the last, which none does, or all do (`Round`).

A bucket is full when each of its parameters has had a gradient. A weight in several reentrant checkpoints
gets several, one in each backward inside the backward; so the first micro-batch with such gradients tells
which weights those are, and their buckets wait for the end of a micro-batch from then on.

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

from patch.compat.torch_internals import current_backward
from patch.distributed.async_collectives import Pending, WaitClock, start_all_reduce, start_reduce_scatter
from patch.errors import TrainingError
from patch.optimizer.layout import BucketRange, ParamRange
from patch.optimizer.micro_batch import Bucket, Round

# Staging buffers of level `gradients`: one filling, one travelling, one for gradients that come before
# the last of the bucket before.
NUM_STAGING = 3


class GradientBuckets:
    """The gradients of a rank's pipeline stages.

    Args:
        parameters: the trainable ones, on one device; `bucket_ranges` refer to them by index.
        names: theirs, for errors.
        bucket_ranges: buckets in the order of backward.
        like: a tensor on their device.
        level: none, optimizer or gradients.
        group: data-parallel ranks (with context parallelism).
        dtype: of collecting and of reduction.
        clock: gets the time that compute waits for reductions.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        names: list[str],
        bucket_ranges: list[BucketRange],
        *,
        like: torch.Tensor,
        level: str,
        group: dist.ProcessGroup,
        dtype: torch.dtype,
        clock: WaitClock,
    ) -> None:
        self._level, self._group, self._clock = level, group, clock
        self._like = torch.empty(0, dtype=dtype, device=like.device)
        # A stream can wait for what was launched, a CPU's other threads cannot.
        self._can_wait_elsewhere = group.size() == 1 or self._like.is_cuda
        self.num_shards = 1 if level == "none" else group.size()
        self._rank = 0 if level == "none" else group.rank()
        self.buckets = self._make_buckets(bucket_ranges)
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
        self._ended: set[int] = set()
        """Stages whose last micro-batch of this step has begun."""
        self._open: list[Bucket] = []
        """The buckets of the stage whose micro-batch is open, and the backward that it began in."""
        self._backward = -1
        self._leaving: deque[Bucket] = deque()
        """Buckets that are to be reduced, in the one order in which they leave."""
        self._rounds: list[Round] = []
        self.start_step()
        for bucket in self.buckets:
            for param in bucket.range.params:
                self._collect(parameters[param.parameter], names[param.parameter], bucket, param)

    def start_step(self) -> None:
        """Forget the last step's gradients, and a backward that an error ended."""
        while self._travelling:
            self._arrive(self._travelling.popleft())
        self._open, self._ended, self._rounds = [], set(), []
        for bucket in self.buckets:
            bucket.is_open = bucket.is_due = False
            bucket.is_shard_empty = True
            bucket.unwritten = set(bucket.range.params)
        self._leaving = deque() if self._level == "gradients" else deque(self.buckets)

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
            output.register_hook(partial(self._on_output_gradient, stage))

    def flush(self) -> None:
        """End the step's last micro-batch, and start every reduction that is left."""
        self._end_micro_batch()
        for stage in dict.fromkeys(bucket.range.stage for bucket in self.buckets):
            if stage not in self._ended:  # its last micro-batch had no gradient on this rank
                self._begin_micro_batch(stage, is_last=True)
                self._end_micro_batch()

    def give_up(self, num_micro_batches: int) -> None:
        """An error ended the step's backward: start the reductions that other ranks expect all the same.

        What they bring is worth nothing. For ranks that hold the whole model.
        """
        self._end_micro_batch()
        while self._level == "gradients" and not self._ended and len(self._rounds) < num_micro_batches - 1:
            self._begin_micro_batch(0, is_last=False)
            self._end_micro_batch()
        self.flush()

    def finish(self) -> None:
        """Wait until every shard holds the sum over micro-batches and ranks.

        Raises:
            TrainingError: level `gradients`, and ranks have unequal numbers of micro-batches.
        """
        self.flush()
        for one_round in self._rounds:
            one_round.check(WaitClock(self._like.device) if self._like.is_cuda else self._clock)
        self._rounds = []
        while self._travelling:
            self._arrive(self._travelling.popleft())

    def _make_buckets(self, bucket_ranges: list[BucketRange]) -> list[Bucket]:
        """Cut the gradient memory: full buffers, or shards of accumulation alone."""
        is_sharded = self._level == "gradients"
        numel = bucket_ranges[-1].end // (self.num_shards if is_sharded else 1)
        flat = self._like.new_zeros(numel)
        buckets = []
        for index, bucket_range in enumerate(bucket_ranges):
            if is_sharded:
                begin = bucket_range.begin // self.num_shards
                shard = flat[begin : begin + bucket_range.numel // self.num_shards]
                buckets.append(Bucket(index, bucket_range, shard, None))
            else:
                begin, end = bucket_range.shard(self._rank, self.num_shards)
                buckets.append(
                    Bucket(index, bucket_range, flat[begin:end], flat[bucket_range.begin : bucket_range.end])
                )
        return buckets

    def _collect(self, parameter: torch.nn.Parameter, name: str, bucket: Bucket, param: ParamRange) -> None:
        begin, end = param.begin - bucket.range.begin, param.end - bucket.range.begin

        def on_gradient(parameter: torch.nn.Parameter) -> None:
            gradient, parameter.grad = parameter.grad, None
            _check(name, gradient, bucket)
            assert gradient is not None
            place = self._lend(bucket)[begin:end].view(parameter.shape)
            # Without its graph, where backward keeps one (create_graph).
            if param in bucket.unwritten:
                place.copy_(gradient.detach())
                bucket.unwritten.remove(param)
            else:
                place.add_(gradient.detach())
            bucket.has_repeats |= param not in bucket.missing
            # Level `gradients` cannot wait: it has no memory for all buckets.
            bucket.has_nested |= self._level != "gradients" and current_backward() != self._backward
            bucket.missing.discard(param)
            self._launch_ready()

        parameter.register_post_accumulate_grad_hook(on_gradient)

    def _on_output_gradient(self, stage: int, gradient: torch.Tensor) -> None:
        if stage in self._ended:
            raise TrainingError(
                f"a backward of stage {stage} began after the step's last, expected one micro-batch outside "
                "`no_sync`, the last: put the others, and all but the last backward of a retained graph, "
                "inside `with optimizer.no_sync()`; between steps call `start_step`"
            )
        self._begin_micro_batch(stage, is_last=not self.is_accumulating)

    def _begin_micro_batch(self, stage: int, *, is_last: bool) -> None:
        self._end_micro_batch()
        self.on_backward()
        begun = [bucket for bucket in self.buckets if bucket.range.stage == stage]
        if self._level == "gradients" and begun:
            self._rounds.append(Round(stage, is_last, self._group, self._like))
            self._leaving += begun
        self._open, self._backward = begun, current_backward()
        if is_last:
            self._ended.add(stage)
        for bucket in begun:
            bucket.begin(is_last, reduces=is_last or self._level == "gradients")

    def _end_micro_batch(self) -> None:
        for bucket in self._open:
            bucket.end()
        self._open = []
        self._launch_ready()

    def _launch_ready(self) -> None:
        while self._leaving and self._leaving[0].is_ready:
            self._launch()

    def _launch(self) -> None:
        """Start the reduction of the next bucket."""
        bucket = self._leaving[0]
        buffer = self._lend(bucket)
        for param in bucket.unwritten:
            buffer[param.begin - bucket.range.begin : param.end - bucket.range.begin].zero_()
        if self.on_launch is not None:
            self.on_launch(bucket.index)
        if self._level == "none":
            bucket.pending = start_all_reduce(buffer, self._group)
        else:
            size = bucket.range.numel // self.num_shards
            own = buffer[self._rank * size : (self._rank + 1) * size]
            # In place; only the first reduction of a ZeRO-2 step can write where the sum is kept.
            out = bucket.shard if self._level == "gradients" and bucket.is_shard_empty else own
            bucket.pending = start_reduce_scatter(buffer, out, self._group)
        self._travelling.append(self._leaving.popleft())  # not before: memory may run out above
        bucket.has_left = True
        bucket.round = self._rounds[-1] if self._rounds else None
        bucket.is_announced = not bucket.is_last
        is_added_later = self._level == "gradients" and not bucket.is_shard_empty
        if bucket.is_last and self._can_wait_elsewhere and not is_added_later:
            bucket.is_announced = True
            self.on_final(bucket.index, bucket.pending)

    def _arrive(self, bucket: Bucket) -> None:
        """Take in a finished reduction and the staging buffer back."""
        assert bucket.pending is not None and bucket.buffer is not None
        if bucket.round is not None and not self._like.is_cuda:  # ranks that disagree send no more
            bucket.round.check(self._clock)
        bucket.round = None
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

    def _lend(self, bucket: Bucket) -> torch.Tensor:
        """The buffer that this micro-batch's gradients of a bucket go to."""
        while bucket.pending is not None:  # the micro-batch before is still on its way
            self._arrive(self._travelling.popleft())
        if bucket.buffer is None:
            bucket.staging = self._borrow_staging()
            bucket.buffer = bucket.staging[: bucket.range.numel]
            bucket.unwritten = set(bucket.range.params)
        return bucket.buffer

    def _borrow_staging(self) -> torch.Tensor:
        """A free staging buffer, a new one while few exist, or the one that comes back first."""
        if not self._staging and self._num_staging >= NUM_STAGING and self._travelling:
            self._arrive(self._travelling.popleft())
        if not self._staging:
            # Beyond NUM_STAGING only when unused parameters hold that many buckets open.
            largest = max(bucket.range.numel for bucket in self.buckets)
            self._staging.append(self._like.new_empty(largest))
            self._num_staging += 1
        return self._staging.pop()


def _check(name: str, gradient: torch.Tensor | None, bucket: Bucket) -> None:
    """Refuse a gradient that would be lost or summed wrongly."""
    if gradient is None:
        raise TrainingError(
            f"{name}: another post-accumulate-grad hook took its gradient, expected none that sets .grad"
        )
    if gradient.layout != torch.strided:
        raise TrainingError(f"{name}: a gradient of layout {gradient.layout}, expected dense (sparse=False)")
    if not bucket.is_open:
        raise TrainingError(
            f"{name}: a gradient of stage {bucket.range.stage} outside its micro-batches, expected "
            "`start_step`, and `watch(output, stage)` of the tensor that backward begins at, before backward"
        )
    if bucket.has_left and bucket.is_last:
        raise TrainingError(
            f"{name}: a second gradient after its bucket was reduced, expected one a micro-batch: it is used "
            "in several reentrant checkpoints. Use use_reentrant=False, or --data-parallel-sharding "
            "optimizer, which waits for all of them where the first micro-batch has them too"
        )


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
