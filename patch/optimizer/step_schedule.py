"""The order of a step: what happens at each event of forward, backward, reduction, update and all-gather.

    event                     what follows
    prepare
      begin_step              the last step's gradients are dropped
      a stage's forward       each module waits for its parameters; ZeRO-3 units are gathered and freed
    reduce
      backward reaches stage  a micro-batch begins: all parameters have arrived, buckets open
      gradient ready          its buckets add it; each full bucket is reduced
      bucket reduced          its shard is final: Adam may copy it to the host, or its norm is computed
      backward ends           open buckets are reduced
      finish_grad_sync        the remaining buckets are reduced: all shards are final
    update
      update                  Adam updates the shards in turns, in the order of the next forward
    gather
      shard updated           its bucket is all-gathered during the next turn and the next forward
      parameter read          the reader waits for the all-gather

The objects below keep memory: gradients (grad_buffer.py), parameters (param_buffer.py) and states
(hybrid_adam.py). The order of ZeRO-3 units within a forward or backward is in zero3/scheduler.py.

Reductions start in the same order on every rank: a bucket is reduced when it and all earlier buckets are
full. Buckets that unused parameters leave open are reduced, in order, when the micro-batch ends. If a stage
has seen no last micro-batch when the step ends, its gradients are reduced then. A bucket is full when each of
its parameters has a gradient. A weight in several reentrant checkpoints gets several gradients, one in each
nested backward. The first micro-batch with such gradients shows which weights those are. From then on their
buckets wait for the end of the micro-batch.

A micro-batch of a stage begins with the stage's first gradient in a backward: at a tensor that its forward
returned, or at a parameter that was used outside of forward. It ends when the next backward or the step's
reductions begin. So ranks with different unused parameters still agree. With an interleaved pipeline a
backward may pass several stages of a rank; it is one micro-batch of each stage.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from patch.compat.torch_internals import call_at_end_of_backward, current_backward, region
from patch.device import stream_of, streams_of
from patch.distributed.async_collectives import CommHandle, WaitClock, queued_on
from patch.errors import TrainingError
from patch.layout.buckets import MAX_IN_FLIGHT
from patch.optimizer.buckets.bucket import Bucket, BucketState
from patch.optimizer.buckets.buffer_group import FlatLayout
from patch.optimizer.buckets.grad_buffer import GradBuffer, ParamGrad
from patch.optimizer.buckets.micro_batch import NO_BACKWARD, LastMicroBatchCheck, NoSync
from patch.optimizer.buckets.param_buffer import ParamBuffer
from patch.optimizer.grad_norm import GradNorm
from patch.optimizer.states.hybrid_adam import HybridAdam
from patch.optimizer.zero3.scheduler import Zero3Scheduler


@dataclass
class LocalCheck:
    """Whether this rank's own gradients are finite before they are reduced."""

    is_finite: bool = True


class _Reduction(NamedTuple):
    """A bucket whose reduction is in flight."""

    bucket: Bucket
    check: LastMicroBatchCheck | None
    """The check over ranks of its micro-batch (stage `gradients`), or None."""
    is_final_later: bool
    """Whether its shard is final only when this rank has finished the reduction."""


_UPDATING: set[StepSchedule] = set()
"""Schedules of this process with gathers that have not started. Other ranks expect these gathers, also of a
model that is not used any more, before the collectives of another model."""


class StepSchedule:
    """The events of this rank's steps.

    Args:
        layout: the layout of the trained parameters.
        group: the data-parallel ranks, which need equal numbers of micro-batches at stage `gradients`.
    """

    def __init__(
        self,
        layout: FlatLayout,
        params: ParamBuffer,
        grads: GradBuffer,
        adam: HybridAdam,
        norm: GradNorm,
        group: dist.ProcessGroup,
        clock: WaitClock,
    ) -> None:
        self._params, self._grads, self._adam, self._norm = params, grads, adam, norm
        self._group, self._clock, self._device = group, clock, layout.held.device
        self._is_cuda = self._device.type == "cuda"
        # A GPU stream can wait for a launched reduction; the other threads of a CPU cannot.
        is_alone = all(each.group.size() == 1 for each in layout.buffer_groups)
        self._can_wait_elsewhere = is_alone or self._is_cuda
        self.no_sync = NoSync()
        """A context for all micro-batches but the last, whose gradients are accumulated."""
        self.local_check: LocalCheck | None = None
        """Gets the result of a check before each reduction, or None if gradients are not checked."""
        self._forwarded: set[int] = set()
        """Stages with a forward since the last step's gradients were reduced."""
        self._in_flight: deque[_Reduction] = deque()
        self._turns = _turns(layout, params)
        self.updating: deque[int] = deque()
        """Buckets whose gathers have not started, in the order that is the same on all ranks."""
        self.pending: dict[int, CommHandle] = {}
        """Gathers in flight, by bucket."""
        self.is_settled = True
        """Whether all parameters have their new values on this rank."""
        self._lock = threading.RLock()
        """Threads that share a model may wait for the same parameters."""
        # A gather that starts during a forward waits for its update, not for compute queued by the forward.
        self._streams = streams_of(self._device)
        is_sharded = any(each.num_shards > 1 for each in layout.buffer_groups)
        self._aside = stream_of(self._device, "gathers") if is_sharded else None
        self._reset()
        self.units = Zero3Scheduler(layout, params, self, clock)
        self._main_grads = [grads.main_grad(each, partial(self._open_place, each)) for each in grads.params]

    # Prepare.

    def begin_step(self, lr: float | Sequence[float], grad_scale: float) -> None:
        """Drop the last step's gradients, and a backward that an error ended; see `HybridAdam.start_step`."""
        self.units.begin_step()
        self._params.leave_whole()
        while self._in_flight:
            self._finish_next()
        for main_grad in filter(None, self._main_grads):
            main_grad.reset()
        self._reset()
        self._adam.start_step(lr, grad_scale)

    def _reset(self) -> None:
        self._is_grad_synced = False
        self._ended: set[int] = set()
        """Stages whose last micro-batch of this step has begun."""
        self._backward, self._open = NO_BACKWARD, set[int]()
        """The open backward, and its stages with a gradient."""
        self._is_over = False
        """Whether the open backward is known to have ended."""
        self._checks: list[LastMicroBatchCheck] = []
        self._grads.reset()
        self._norm.forget_norms()
        # With staging buffers each micro-batch adds its buckets.
        self._to_reduce = deque(() if self._grads.staging else self._grads.buckets)
        """Buckets to be reduced, in the order of their reductions."""

    def forward_begins(self, stage: int) -> None:
        """Begin a stage's forward outside of backward.

        Raises:
            TrainingError: the step's last micro-batch has begun on some ranks only (on a CPU). If weights are
                gathered in forward, a rank that continues alone would wait forever.
        """
        if self.units.is_sharded and not self._is_cuda:
            for check in self._checks:
                check.wait(self._clock)
        for other in [*_UPDATING]:
            if other is not self:
                other.start_param_sync()
        self.units.begin_forward(stage)

    def forward_ends(self, stage: int, output: Any) -> None:
        """End a stage's forward; an error ended it if `output` is None."""
        if current_backward() == NO_BACKWARD:
            self.units.end_forward(stage, output)
        if output is not None and torch.is_grad_enabled():
            self._forwarded.add(stage)

    # Reduce: where micro-batches begin and end.

    def reach_stage(self, stage: int, backward: int) -> None:
        """Begin the stage's micro-batch at its first gradient in a backward."""
        if backward == self._backward and stage in self._open:
            return
        if stage in self._ended:
            raise TrainingError(
                f"a backward of stage {stage} began after the step's last micro-batch, expected none. Put "
                "all backwards but the last (also those of torch.autograd.grad and of a retained graph) "
                "inside `optimizer.no_sync()`, call `zero_grad` between steps, and use use_reentrant=False"
            )
        if backward != self._backward:
            self._end_backward()
            if backward == current_backward():  # an outer backward may end later than this one
                call_at_end_of_backward(partial(self._note_end, backward))
        self._backward = backward
        self._begin_micro_batch(stage, is_last=not self.no_sync.is_open)

    def _note_end(self, backward: int) -> None:
        self._is_over |= backward == self._backward

    def _begin_micro_batch(self, stage: int, *, is_last: bool) -> None:
        self.finish_param_sync()  # gradients are overwritten, and unused modules have not waited
        self.units.begin_backward(stage)
        begun = [bucket for bucket in self._grads.buckets if bucket.range.stage == stage]
        if self._grads.staging is not None and begun:
            self._checks.append(LastMicroBatchCheck(stage, is_last, self._group, self._device))
            self._to_reduce += begun
        for bucket in begun:
            bucket.begin_micro_batch(is_last=is_last)
        self._open.add(stage)
        if is_last:
            self._ended.add(stage)

    def _end_backward(self) -> None:
        """End the open backward: it brings no further gradient."""
        stages, self._open = self._open, set()
        self._backward, self._is_over = NO_BACKWARD, False
        self.units.end_backward()
        for bucket in self._grads.buckets:
            if bucket.range.stage in stages:
                bucket.end_micro_batch()
        self._launch_ready()

    def close(self, indices: Iterable[int]) -> None:
        """Record that the open micro-batch brings these buckets no further gradient."""
        for index in indices:
            self._grads.buckets[index].close()
        self._launch_ready()

    # Reduce: from a gradient to a final shard.

    def gradient_ready(self, number: int, parameter: torch.nn.Parameter) -> None:
        """Add the gradient of trained parameter `number` to its buckets, and reduce buckets that are full."""
        grad, main_grad = self._grads.params[number], self._main_grads[number]
        gradient, parameter.grad = parameter.grad, None
        is_written = main_grad is not None and gradient is not None and main_grad.take_note(gradient)
        grad.check(gradient)
        assert gradient is not None
        self._begin_writing(grad)
        is_nested = current_backward() != self._backward
        for bucket, param in grad.parts:
            self._provide_buffer(bucket)
            part = None if is_written else grad.part(gradient, param)
            bucket.collect(param, part, is_nested=is_nested)
            self._launch_ready()
        self.units.collected(parameter)

    def _open_place(self, grad: ParamGrad) -> tuple[torch.Tensor, bool]:
        """Return where a layer writes a parameter's next gradient, and whether to overwrite old values."""
        self._begin_writing(grad)
        for bucket, _ in grad.parts:
            self._provide_buffer(bucket)
        return self._grads.open_place(grad)

    def _begin_writing(self, grad: ParamGrad) -> None:
        stage = grad.parts[0][0].range.stage
        if (self._is_over or stage not in self._open) and stage in self._forwarded:
            self.reach_stage(stage, current_backward())  # used outside of forward
        for bucket, param in grad.parts:
            if stage not in self._open:
                raise grad.without_forward(stage)
            if bucket.state is BucketState.REDUCED:
                raise grad.too_late(is_first=bucket.is_missing(param))

    def _provide_buffer(self, bucket: Bucket) -> None:
        while bucket.pending is not None:  # from the micro-batch before
            self._finish_next()
        if bucket.buffer is None:
            staging = self._grads.staging
            assert staging is not None, "other stages keep buffers of their own"
            while staging.is_used_up(bucket.range.numel) and self._in_flight:
                self._finish_next()
            bucket.use_staging(staging.take(bucket.range.numel))

    def _launch_ready(self) -> None:
        while self._to_reduce and self._to_reduce[0].is_ready:
            self._launch()

    def _launch(self) -> None:
        bucket = self._to_reduce[0]
        self._provide_buffer(bucket)
        bucket.complete()
        if self.local_check is not None:
            self.local_check.is_finite &= bucket.is_finite()
        collective = "reduce-scatter" if bucket.buffer_group.stage.shards_states else "all-reduce"
        with region("bucket %d %s", bucket.index, collective):
            bucket.start_grad_sync()
        self._to_reduce.popleft()  # not earlier: memory may run out above
        is_final = self._can_wait_elsewhere and bucket.is_shard_final
        check = self._checks[-1] if self._checks else None
        self._in_flight.append(_Reduction(bucket, check, bucket.is_last and not is_final))
        if bucket.is_last and is_final:
            self._shard_final(bucket.index, bucket.pending)
        # A CPU accumulates a finished reduction only when it waits for it, at the latest after backward.
        # Waiting here costs nothing: with so many reductions in flight, the network limits the step.
        while not self._is_cuda and len(self._in_flight) > MAX_IN_FLIGHT:
            self._finish_next()

    def _finish_next(self) -> None:
        bucket, check, is_final_later = self._in_flight.popleft()
        if check is not None and not self._is_cuda:  # disagreeing ranks stop here
            check.wait(self._clock)
        bucket.finish_grad_sync(self._clock)
        staging = bucket.drop_staging()
        if staging is not None and self._grads.staging is not None:
            self._grads.staging.give_back(staging)
        if is_final_later:
            self._shard_final(bucket.index, None)

    def _shard_final(self, index: int, after: CommHandle | None) -> None:
        """Use a shard that is final now, or (`after`) when its reduction has ended."""
        self._adam.grad_ready(index, after)
        if after is not None or not self._is_cuda:  # a GPU computes late norms together
            self._norm.start_norm(index, after)

    def start_grad_sync(self) -> None:
        """End the step's last micro-batch of each stage, and start the remaining reductions."""
        self._end_backward()
        for stage in dict.fromkeys(bucket.range.stage for bucket in self._grads.buckets):
            if stage not in self._ended:  # this rank had no gradient of the stage
                self._begin_micro_batch(stage, is_last=True)
                self._end_backward()
        self.units.end_pass()

    def finish_grad_sync(self) -> None:
        """Wait until every shard holds the final sum; later calls in a step do nothing.

        Raises:
            TrainingError: at stage `gradients`, ranks have unequal numbers of micro-batches.
        """
        if self._is_grad_synced:
            return
        self.start_grad_sync()
        self._forwarded.clear()
        for check in self._checks:
            check.wait(WaitClock(self._device) if self._is_cuda else self._clock)
        self._checks = []
        while self._in_flight:
            self._finish_next()
        self._norm.sum_over_model_parallel(self._clock)
        self._is_grad_synced = True

    def abandon_backward(self, num_micro_batches: int) -> None:
        """After an error in backward, start the collectives that other ranks still expect.

        Their results are invalid. Only for ranks that hold the whole model.
        """
        self.finish_param_sync()
        for grad in self._grads.params:
            grad.parameter.grad = None  # left if a bucket got no memory
        self.units.end_pass()
        self._end_backward()
        while self._grads.staging and not self._ended and len(self._checks) < num_micro_batches - 1:
            self._begin_micro_batch(0, is_last=False)
            self._end_backward()
        self.start_grad_sync()

    def expect_writes(self) -> None:
        """Expect that the caller writes parameters whose updates have ended; it may also only read them."""
        self._adam.forget_host_weights()

    # Update.

    def update(self, lr: float | Sequence[float], grad_scale: float) -> None:
        """Update all shards in turns; each turn is gathered while the next is updated. See `HybridAdam`."""
        self._adam.start_update(lr, grad_scale)
        for indices in self._turns:
            self._adam.update(indices)
            self._shards_updated(indices)
        if self._params.to_prepare:
            self._shards_updated([])

    # Gather.

    def _shards_updated(self, indices: Sequence[int]) -> None:
        """Record that this rank's parts of buckets are being updated, and start their gathers when possible.

        It blocks only if ranks exchange data before gathers: then for the gathers of the turn before,
        whose exchange is done. All ranks call it for all buckets in the same order.
        """
        if self._aside is not None:
            self._aside.wait_stream(self._streams.current_stream())
        with self._lock:
            if self._params.to_prepare:
                with self._on_gather_stream():
                    for flat in self._params.to_prepare:
                        flat.prepare(indices)
                if self.updating:
                    self._start_gathers(self.updating[-1])
            increment_version([each for index in indices for each in self._params.members[index]])
            self.updating += indices
            self._start_gathers()
            self._note_settled()

    def _start_gathers(self, up_to: int | None = None) -> None:
        """Start all gathers whose updates are done, and block for those up to the bucket `up_to`."""
        while self.updating:
            index, is_blocking = self.updating[0], up_to in self.updating
            flat = self._params.flat_of(index)
            with self._on_gather_stream():
                is_prepared = is_blocking or flat.is_prepared(index)
                if not (is_prepared and self._adam.wait_for_update(index, block=is_blocking)):
                    return
                self.updating.popleft()
                pending = flat.start_gather(index)
                if pending is None and self._aside is not None:
                    # There is one shard. Only the stream aside has waited for the update; compute has not.
                    pending = queued_on(self._aside)
            if pending is None:
                increment_version(self._params.members[index])
            else:
                self.pending[index] = pending

    def _on_gather_stream(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._aside is None else self._streams.stream(self._aside)

    def _start_gathers_up_to(self, index: int) -> None:
        if self.updating:
            with self._clock.waiting():
                self._start_gathers(index)

    def _note_settled(self) -> None:
        self.is_settled = not self.updating and not self.pending
        (_UPDATING.add if self.updating else _UPDATING.discard)(self)

    def is_updated(self, indices: Sequence[int]) -> bool:
        """Return whether this rank's parts of buckets are updated, or only compute has to wait for them."""
        with self._lock:
            self._start_gathers()
            return not any(index in self.updating for index in indices)

    def wait_for(self, indices: Iterable[int]) -> None:
        """Wait until the parameters of these buckets have their new values on this rank."""
        with self._lock:
            for index in indices:
                self._start_gathers_up_to(index)
                pending = self.pending.pop(index, None)
                if pending is not None:
                    pending.wait(self._clock)
                    increment_version(self._params.members[index])
            self._note_settled()

    def start_param_sync(self) -> None:
        """Wait until this rank's parts are updated, and start the remaining gathers.

        It does not wait for other ranks, which may wait for this rank's forward outside a step.
        """
        with self._lock:
            if self.updating:
                self._start_gathers_up_to(self.updating[-1])
            self._note_settled()

    def finish_param_sync(self) -> None:
        """Wait until every parameter has its new value on this rank."""
        if not self.is_settled:
            self.wait_for([*self.pending, *self.updating])


def _turns(layout: FlatLayout, params: ParamBuffer) -> list[list[int]]:
    """Cut the buckets into the turns of an update: in the order of the next forward, from the last bucket.

    If ranks shard states, turns have 1, 2, 4, ... parts. So the first gather starts at once, and few calls
    are made for the rest. A part is a bucket, or all buckets of a parameter that needs preparation.
    """
    parts: list[list[int]] = []
    last: int | None = None
    for index, bucket_range in enumerate(layout.bucket_ranges):
        parameter = bucket_range.params[-1].parameter if bucket_range.params else None
        if params.flat_of(index) in params.to_prepare and parameter is not None and parameter == last:
            parts[-1].append(index)
        else:
            parts.append([index])
        last = parameter
    parts.reverse()
    turns, size = [], 1 if layout.buffer_groups[0].stage.shards_states else len(parts)
    while parts:
        turns.append([*chain.from_iterable(parts[:size])])
        parts, size = parts[size:], 2 * size
    return turns
