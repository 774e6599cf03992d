"""The gradients of a rank: collected from backward, reduced bucket by bucket while backward goes on.

How a bucket is reduced and what a rank keeps is said by the domain's `Sharding` (domain.py). A rank that
keeps its shards only has a few rotating buffers, in which buckets are staged (bucket.py).

Reductions start in one order on every rank: a bucket's when it and all earlier buckets are full. What unused
parameters leave open is reduced, in order, when the micro-batch ends.

A stage whose last micro-batch (micro_batch.py) was not seen when the step ends is reduced then, with what
came before. At stage `gradients` every micro-batch is reduced, so ranks must have equally many
(`LastMicroBatchCheck`).

A bucket is full when each of its parameters has had a gradient. A weight in several reentrant checkpoints
gets several, one in each backward inside the backward; so the first micro-batch with such gradients tells
which weights those are, and their buckets wait for the end of a micro-batch from then on.

A rank of an interleaved pipeline has several stages. A backward concerns the buckets of the stages that it
passes. Each domain has a flat buffer of its own; the buckets of all domains leave in one order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import partial
from weakref import ref

import torch
import torch.distributed as dist

from patch.compat.torch_internals import region
from patch.config.schema import OptimizerConfig
from patch.device import torch_dtype
from patch.distributed.async_collectives import Pending, RoundedSums, WaitClock, follows_on_device
from patch.errors import TrainingError
from patch.layout.buckets import MAX_TRAVELLING, NUM_STAGING, ParamRange
from patch.optimizer.bucket import Bucket, Staging
from patch.optimizer.domain import Domain, FlatLayout
from patch.optimizer.main_grad import MainGrad, StandIns, is_fused
from patch.optimizer.micro_batch import LastMicroBatchCheck, MicroBatches


@dataclass
class LocalCheck:
    """Whether the gradients of this rank alone are finite, when they leave to be summed."""

    is_finite: bool = True


class GradBuffer:
    """The gradients of a rank's pipeline stages.

    Args:
        layout: of the parameters.
        config: the type in which gradients are collected, and whether layers add them up themselves.
        group: the data-parallel ranks, which have equally many micro-batches at stage `gradients`.
        clock: gets the time that compute waits for reductions.
        on_backward: called with the stage before the first gradient of each micro-batch, or the zeros of one
            without any.
        on_collected: called with a parameter's index when its gradient is in its place.
        on_end: called when a micro-batch has ended, before what is left of it is reduced.
        on_final: called with a bucket's index when its shard is final, or, with what it waits for, will be.
    """

    def __init__(
        self,
        layout: FlatLayout,
        config: OptimizerConfig,
        group: dist.ProcessGroup,
        clock: WaitClock,
        *,
        on_backward: Callable[[int], None],
        on_collected: Callable[[int], None],
        on_end: Callable[[], None],
        on_final: Callable[[int, Pending | None], None],
    ) -> None:
        domains, bucket_ranges, named = layout.domains, layout.bucket_ranges, layout.held.named
        like = torch.empty(0, dtype=torch_dtype(config.main_grads_dtype), device=layout.held.device)
        self._group, self._clock, self._like = group, clock, like
        self._on_backward, self._on_final = on_backward, on_final
        self._on_collected, self._on_end = on_collected, on_end
        # A stream can wait for what was launched, a CPU's other threads cannot.
        self._can_wait_elsewhere = all(domain.group.size() == 1 for domain in domains) or like.is_cuda
        largest = max(bucket_range.numel for bucket_range in bucket_ranges)
        self._rounded_sums = _rounded_sums(largest, domains[0], like.device)
        self._domains = domains
        self._flats = [
            domain.sharding.kept(domain, like, numel)
            for domain, numel in zip(domains, layout.numels, strict=True)
        ]
        self.buckets = []
        for index, bucket_range in enumerate(bucket_ranges):
            domain, flat = domains[bucket_range.domain], self._flats[bucket_range.domain]
            shard, buffer = domain.sharding.places(domain, flat, bucket_range)
            self.buckets.append(Bucket(index, bucket_range, shard, buffer, domain, self._rounded_sums))
        # Those of no unit, mostly norms in one bucket, are open through all of a backward.
        others = max((each.numel for each in bucket_ranges if not each.unit), default=largest)
        numels = [*[largest] * (NUM_STAGING - 1), others][: len(bucket_ranges)]
        self._staging = Staging(like, numels) if domains[0].sharding.is_staged else None
        self._travelling: deque[Bucket] = deque()
        """Buckets whose reductions are under way."""
        self._leaving: deque[Bucket] = deque()
        """Buckets that are to be reduced, in the one order in which they leave."""
        self.micro_batches = MicroBatches(
            layout.held.stages, self._begin_micro_batch, self._end_micro_batches
        )
        self._checks: list[LastMicroBatchCheck] = []
        self.local_check: LocalCheck | None = None
        """Gets what is found in each bucket before its reduction; None: nobody looks."""
        self._is_fused, self._stand_ins = is_fused(config, like.device), StandIns()
        self._collected: list[tuple[str, list[tuple[Bucket, ParamRange]], MainGrad | None]] = []
        self.reset()
        places: dict[int, list[tuple[Bucket, ParamRange]]] = {}
        for bucket in self.buckets:
            for param in bucket.range.params:
                places.setdefault(param.parameter, []).append((bucket, param))
        for index, parts in places.items():
            self._register(*named[index], parts)

    def reset(self) -> None:
        """Forget the last step's gradients, and a backward that an error ended."""
        while self._travelling:
            self._finish_next()
        self.micro_batches.reset()
        self._checks = []
        for *_, main_grad in self._collected:
            if main_grad is not None:
                main_grad.reset()
        for bucket in self.buckets:
            bucket.reset()
        self._leaving = deque(self.buckets)
        if self._staging is not None:
            self._staging.reset()
            self._leaving.clear()  # they come with each micro-batch

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients on the device, staging buffers included."""
        others = [part.num_bytes for part in (self._staging, self._rounded_sums) if part is not None]
        flats = zip(self._flats, self._domains, strict=True)
        return sum(flat.nbytes for flat, domain in flats if not domain.is_on_host) + sum(others)

    def start_grad_sync(self) -> None:
        """End the step's last micro-batch, and start every reduction that is left."""
        self.micro_batches.end_all(dict.fromkeys(bucket.range.stage for bucket in self.buckets))

    def finish_grad_sync(self) -> None:
        """Wait until every shard holds the sum over micro-batches and ranks.

        Raises:
            TrainingError: stage `gradients`, and ranks have unequal numbers of micro-batches.
        """
        self.start_grad_sync()
        self.micro_batches.forget_forwards()
        for check in self._checks:
            check.wait(WaitClock(self._like.device) if self._like.is_cuda else self._clock)
        self._checks = []
        while self._travelling:
            self._finish_next()

    def check_micro_batches(self) -> None:
        """On a CPU learn what other ranks say of the micro-batches until now: may another one follow?

        Where weights are gathered in forward, a rank that goes on alone would wait for ever.

        Raises:
            TrainingError: for some ranks the step's last one has come, for others not.
        """
        for check in () if self._like.is_cuda else self._checks:
            check.wait(self._clock)

    def end_buckets(self, indices: list[int]) -> None:
        """The micro-batch that is open brings these buckets no further gradient."""
        for index in indices:
            if self.buckets[index].is_open:
                self.buckets[index].pass_by()
        self._launch_ready()

    def abandon_backward(self, num_micro_batches: int) -> None:
        """An error ended the step's backward: start the reductions that other ranks expect all the same.

        What they bring is worth nothing. For ranks that hold the whole model.

        Args:
            num_micro_batches: how many the step has on each rank.
        """
        self.micro_batches.end()
        while self._staging and not self.micro_batches.ended and len(self._checks) < num_micro_batches - 1:
            self.micro_batches.begin(0, is_last=False)
            self.micro_batches.end()
        self.start_grad_sync()

    def _register(
        self, name: str, parameter: torch.nn.Parameter, parts: list[tuple[Bucket, ParamRange]]
    ) -> None:
        """Have a parameter's gradients collected, in one bucket or several, as backward completes them."""
        main_grad: MainGrad | None = None
        # Staged, the parts of a parameter that is cut are not beside each other.
        if self._is_fused and (len(parts) == 1 or self._staging is None):
            place = partial(self._find_place, name, parameter.shape, parts)
            main_grad = MainGrad(parameter, self._stand_ins, place)

        # What a hook after accumulation refers to is never collected (torch does not show it to Python's
        # collector), and a process that builds a second run would keep the memory of the first.
        own, number = ref(self), len(self._collected)
        self._collected.append((name, parts, main_grad))

        def on_gradient(parameter: torch.nn.Parameter) -> None:
            buffer = own()
            if buffer is not None:
                buffer._on_gradient(number, parameter)

        parameter.register_post_accumulate_grad_hook(on_gradient)

    def _on_gradient(self, number: int, parameter: torch.nn.Parameter) -> None:
        name, parts, main_grad = self._collected[number]
        gradient, parameter.grad = parameter.grad, None
        is_written = main_grad is not None and gradient is not None and main_grad.take_note(gradient)
        _check_gradient(name, gradient)
        assert gradient is not None
        self._begin_writing(name, parts)
        is_nested = self.micro_batches.is_nested
        for bucket, param in parts:
            self._provide_buffer(bucket)
            part = None if is_written else _part(gradient, param, len(parts))
            bucket.collect(param, part, is_nested=is_nested)
            self._launch_ready()
        self._on_collected(parts[0][1].parameter)

    def _begin_writing(self, name: str, parts: list[tuple[Bucket, ParamRange]]) -> None:
        """A gradient of a parameter is about to be written to its buckets."""
        self.micro_batches.note_gradient(parts[0][0].range.stage)
        for bucket, _ in parts:
            _check_bucket(name, bucket)

    def _find_place(
        self, name: str, shape: torch.Size, parts: list[tuple[Bucket, ParamRange]]
    ) -> tuple[torch.Tensor, bool]:
        """Where a layer is to write a parameter's gradient now; whether it overwrites what is there."""
        self._begin_writing(name, parts)
        for bucket, _ in parts:
            self._provide_buffer(bucket)
        places = [bucket.open_place(param) for bucket, param in parts]
        place, is_first = places[0]
        if len(parts) > 1:
            place = self._flats[parts[0][0].range.domain][parts[0][1].begin : parts[-1][1].end]
        return place.view(shape), is_first

    def _begin_micro_batch(self, stage: int, is_last: bool) -> None:
        self._on_backward(stage)
        begun = [bucket for bucket in self.buckets if bucket.range.stage == stage]
        if self._staging is not None and begun:
            self._checks.append(LastMicroBatchCheck(stage, is_last, self._group, self._like))
            self._leaving += begun
        for bucket in begun:
            bucket.begin_micro_batch(is_last=is_last)

    def _end_micro_batches(self, stages: Set[int]) -> None:
        self._on_end()
        for bucket in self.buckets:
            if bucket.range.stage in stages:
                bucket.end_micro_batch()
        self._launch_ready()

    def _launch_ready(self) -> None:
        while self._leaving and self._leaving[0].is_ready:
            self._launch()

    def _launch(self) -> None:
        """Start the reduction of the next bucket."""
        bucket = self._leaving[0]
        self._provide_buffer(bucket)
        bucket.complete()
        if self.local_check is not None:
            self.local_check.is_finite &= bucket.is_finite()
        with region("bucket %d %s", bucket.index, bucket.domain.sharding.collective):
            bucket.start_grad_sync()
        self._travelling.append(self._leaving.popleft())  # not before: memory may run out above
        bucket.check = self._checks[-1] if self._checks else None
        is_final = self._can_wait_elsewhere and bucket.is_shard_final
        bucket.notify_when_done = bucket.is_last and not is_final
        if bucket.is_last and is_final:
            self._on_final(bucket.index, bucket.pending)
        # A CPU adds up what has arrived only when it waits for it, after backward if nobody waited before. To
        # wait costs nothing: while so many travel, the network is what a step waits for.
        while not self._like.is_cuda and len(self._travelling) > MAX_TRAVELLING:
            self._finish_next()

    def _finish_next(self) -> None:
        """Wait for the oldest reduction that is under way; its staging buffer is free again."""
        bucket = self._travelling.popleft()
        if bucket.check is not None and not self._like.is_cuda:  # ranks that disagree send no more
            bucket.check.wait(self._clock)
        bucket.check = None
        bucket.finish_grad_sync(self._clock)
        staging = bucket.drop_staging()
        if staging is not None and self._staging is not None:
            self._staging.give_back(staging)
        if bucket.notify_when_done:
            self._on_final(bucket.index, None)

    def _provide_buffer(self, bucket: Bucket) -> None:
        """Let a bucket have a buffer that this micro-batch's gradients can go to."""
        while bucket.pending is not None:  # the micro-batch before is still on its way
            self._finish_next()
        if bucket.buffer is None:
            assert self._staging is not None, "other stages keep buffers of their own"
            while self._staging.is_used_up(bucket.range.numel) and self._travelling:
                self._finish_next()
            bucket.use_staging(self._staging.take(bucket.range.numel))


def _rounded_sums(numel: int, domain: Domain, device: torch.device) -> RoundedSums | None:
    """For gradients that travel in fewer bits over NCCL, if they do; what is true of one domain is of all."""
    if domain.travels_as is None or not follows_on_device(domain.instance):
        return None
    return RoundedSums(numel, domain.travels_as, device)


def _part(gradient: torch.Tensor, param: ParamRange, num_parts: int) -> torch.Tensor:
    """The gradient of a parameter's part: as it is, or of a parameter that is cut flat."""
    if num_parts == 1:
        return gradient
    return gradient.reshape(-1)[param.offset : param.offset + param.end - param.begin]


def _check_gradient(name: str, gradient: torch.Tensor | None) -> None:
    """Refuse a gradient that would be lost."""
    if gradient is None:
        raise TrainingError(
            f"{name}: another post-accumulate-grad hook took its gradient, expected none that sets .grad"
        )
    if gradient.layout != torch.strided:
        raise TrainingError(f"{name}: a gradient of layout {gradient.layout}, expected dense (sparse=False)")


def _check_bucket(name: str, bucket: Bucket) -> None:
    """Refuse a gradient that would be lost or summed wrongly in its bucket."""
    if not bucket.is_open:
        raise TrainingError(
            f"{name}: a gradient without a forward of stage {bucket.range.stage} in this step, expected one: "
            "call the model that the optimizer was built with (`model(...)`), not only a part of it, and "
            "`zero_grad` between steps"
        )
    if bucket.has_left and bucket.was_passed:
        raise TrainingError(
            f"{name}: a gradient after backward had come to a module before it, expected modules that run in "
            "the order in which the model lists them: list them so, or use --data-parallel-sharding gradients"
        )
    if bucket.has_left:
        raise TrainingError(
            f"{name}: a second gradient after its bucket was reduced, expected one a micro-batch: it is used "
            "in several reentrant checkpoints. Use use_reentrant=False, or --data-parallel-sharding "
            "optimizer, which waits for all of them where the first micro-batch has them too"
        )
