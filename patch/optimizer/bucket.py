"""One bucket of gradients: it collects them, reduces them, and knows when it is full; buffers to stage it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from patch.distributed.async_collectives import Pending, RoundedSums, WaitClock
from patch.layout.buckets import BucketRange, ParamRange
from patch.optimizer.domain import Domain
from patch.optimizer.micro_batch import LastMicroBatchCheck


class Bucket:
    """The gradients of the parameters of one bucket.

    Of each micro-batch: `begin_micro_batch`; `collect` for every gradient; `end_micro_batch`. Once it is
    ready: `complete`, `start_grad_sync`, `finish_grad_sync`. Between two steps: `reset`.

    Args:
        index: its place in the order of backward.
        bucket_range: its parameters.
        shard: (n,) this rank's reduced gradients; final when the buffer's `finish_grad_sync` returns.
        buffer: (shards * n,) where gradients are collected; None: in a staging buffer, see `use_staging`.
        domain: over which ranks it is reduced, and how.
        rounded_sums: over NCCL, for gradients that travel in fewer bits.
    """

    def __init__(
        self,
        index: int,
        bucket_range: BucketRange,
        shard: torch.Tensor,
        buffer: torch.Tensor | None,
        domain: Domain,
        rounded_sums: RoundedSums | None = None,
    ) -> None:
        self.index, self.range, self.shard = index, bucket_range, shard
        self.domain, self._rounded_sums = domain, rounded_sums
        self._places_in: dict[int, dict[ParamRange, torch.Tensor]] = {}
        """The views of each buffer that gradients are collected in, by its address. Buffers are never freed:
        to make a view anew for each gradient takes as long as to add it."""
        self._set_buffer(buffer)
        self._staging: torch.Tensor | None = None
        self.is_open = False
        """Whether a micro-batch of its stage has begun backward and has not ended."""
        self.is_last = False
        """Whether the stage's newest micro-batch is the last one of the step."""
        self.has_left = False
        """Whether the reduction of the stage's newest micro-batch has started."""
        self.pending: Pending | None = None
        """The reduction that is under way."""
        self.check: LastMicroBatchCheck | None = None
        """A check over ranks of the micro-batch that is being reduced (stage `gradients`)."""
        self.notify_when_done = False
        """Whether the optimizer is to be told when the reduction that is under way has arrived."""
        self._is_due = self._is_over = self.was_passed = False
        """State of the newest micro-batch: whether it is reduced, whether it brings no more, and whether some
        parameters then lacked gradients while others came."""
        self._missing: set[ParamRange] = set()
        """Parameters without a gradient in the micro-batch that is open."""
        self._unused = set(bucket_range.params)
        """Parameters that had no gradient in any micro-batch that has ended."""
        self._is_shard_summed = False
        """Whether the shard has what the newest reduction brought."""
        self._has_nested = self._has_repeats = False
        """Whether a gradient ever came from a backward inside the backward; whether a parameter ever got
        several gradients in one micro-batch."""
        self.reset()

    def reset(self) -> None:
        """Forget the gradients of the step before."""
        self.is_open = self._is_due = False
        self._is_shard_empty = True
        self.drop_staging()
        self._unwritten = set(self.range.params)
        """Parameters that have given the buffer no gradient yet: their elements hold old values."""

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """A micro-batch of the stage begins its backward."""
        self._missing = set(self.range.params)
        self.is_open, self.has_left, self._is_over, self.was_passed = True, False, False, False
        self.is_last = is_last
        self._is_due = is_last or self.domain.sharding.is_staged

    def pass_by(self) -> None:
        """Backward goes on without further gradients for it."""
        self.was_passed |= bool(self._missing) and not self._is_over
        self._is_over = True

    def end_micro_batch(self) -> None:
        """The micro-batch will give no further gradient."""
        self._unused &= self._missing
        self.is_open, self._is_over = False, True

    @property
    def is_ready(self) -> bool:
        """Whether the micro-batch is to be reduced and will give no further gradient."""
        may_repeat = self._has_repeats or (self._has_nested and self._unused)
        return self._is_due and (self._is_over or not (self._missing or may_repeat))

    def use_staging(self, staging: torch.Tensor) -> None:
        """Collect the next gradients in `staging`, until `drop_staging`."""
        self._staging = staging
        self._set_buffer(staging[: self.range.numel])
        self._unwritten = set(self.range.params)

    def _set_buffer(self, buffer: torch.Tensor | None) -> None:
        self.buffer = buffer
        self._places = {} if buffer is None else self._places_in.setdefault(buffer.data_ptr(), {})

    def drop_staging(self) -> torch.Tensor | None:
        """The staging buffer that it had, which is free again; None: it had none."""
        staging, self._staging = self._staging, None
        if staging is not None:
            self._set_buffer(None)
        return staging

    def open_place(self, param: ParamRange) -> tuple[torch.Tensor, bool]:
        """Where a gradient of the parameter is to be written now, flat, and whether it is the first one.

        The first one overwrites what is there, others are added to it.
        """
        return self._elements(param), self._open(param)

    def _open(self, param: ParamRange) -> bool:
        """Note that a gradient of the parameter is being written; whether it is the first one."""
        is_first = param in self._unwritten
        self._unwritten.discard(param)
        return is_first

    @property
    def _collected(self) -> torch.Tensor:
        """The buffer that there is now."""
        assert self.buffer is not None, "use_staging comes first"
        return self.buffer

    def _elements(self, param: ParamRange) -> torch.Tensor:
        """(n,) what belongs to a parameter in the buffer."""
        return self._collected[param.begin - self.range.begin : param.end - self.range.begin]

    def collect(self, param: ParamRange, gradient: torch.Tensor | None, *, is_nested: bool) -> None:
        """Add the gradient of one parameter, or of its part in this bucket, to the buffer.

        Args:
            gradient: None: it was written to its place (`open_place`) already.
            is_nested: it comes from a backward inside the backward (a reentrant checkpoint).
        """
        if gradient is not None:
            place = self._places.get(param)
            if place is None:
                place = self._places[param] = self._elements(param).view(gradient.shape)
            if gradient.requires_grad:  # without its graph, where backward keeps one (create_graph)
                gradient = gradient.detach()
            if self._open(param):
                place.copy_(gradient)
            else:
                place.add_(gradient)
        self._has_repeats |= param not in self._missing
        # What is staged cannot wait for repeats: there is no memory for all buckets.
        self._has_nested |= is_nested and not self.domain.sharding.is_staged
        self._missing.discard(param)

    @property
    def is_shard_final(self) -> bool:
        """Whether the reduction writes the final sum into the shard, with nothing to be added afterwards."""
        if self.domain.is_on_host:
            return False
        return not self.domain.sharding.is_staged or self._is_shard_empty

    def complete(self) -> None:
        """Before the reduction: a parameter without a gradient counts as zeros, as padding does."""
        for param in self._unwritten:
            self._elements(param).zero_()
        if self._staging is not None:  # it has what another bucket left there, or memory that nobody wrote
            end = max((param.end for param in self.range.params), default=self.range.begin)
            self._collected[end - self.range.begin :].zero_()

    def is_finite(self) -> bool:
        """Whether everything that was collected is finite; waits for the device."""
        return bool(self._collected.isfinite().all())

    def start_grad_sync(self) -> None:
        """Start the reduction of what was collected and completed."""
        self._is_shard_summed = False
        domain, buffer = self.domain, self._collected
        out = self.shard if self.is_shard_final else self._own_part()
        self.pending = domain.sharding.start_reduction(domain, buffer, out, self._rounded_sums)
        if domain.across is not None and self.is_last:
            self.pending = self.pending.then(self._sum_instances, domain.instance, self.shard.device)
        self.has_left = True

    def _sum_instances(self) -> Pending:
        """The instance's sum of the step is there: add up those of all instances."""
        self._add_to_shard()
        return self.domain.start_sum_of_instances(self.shard)

    def _add_to_shard(self) -> None:
        """Add what was reduced to the sum of the micro-batches before, if it is not there yet."""
        if not self.is_shard_final and not self._is_shard_summed:
            own = self._own_part()
            if self.domain.is_on_host:  # the device adds up, so that no thread waits for it
                total = (
                    own if self._is_shard_empty else own.add_(self.shard.to(own.device, non_blocking=True))
                )
                self.shard.copy_(total, non_blocking=True)
            else:
                self.shard.add_(own)
        self._is_shard_summed = True

    def finish_grad_sync(self, clock: WaitClock) -> None:
        """Wait for the reduction."""
        assert self.pending is not None, "start_grad_sync comes first"
        self.pending.wait(clock)
        self.pending = None
        self._add_to_shard()
        self._is_shard_empty = False

    def _own_part(self) -> torch.Tensor:
        """(n,) the part of the buffer that belongs to this rank."""
        begin, end = self.domain.own(self.range)
        return self._collected[begin - self.range.begin : end - self.range.begin]


class Staging:
    """Buffers in which buckets are collected and sent if a rank keeps its shards only (stage `gradients`).

    There are more than a few buffers only where unused parameters or several domains hold buckets open while
    others are filled.

    Args:
        like: on the device, of the type of gradients.
        numels: of the buffers, the first as many as the largest bucket: so many buckets may be open at a
            time, from the first gradient until the sum is there.
    """

    def __init__(self, like: torch.Tensor, numels: Sequence[int]) -> None:
        self._buffers = [like.new_empty(numel) for numel in numels]
        self.reset()

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def reset(self) -> None:
        """Begin a step: no bucket has a buffer, whatever an error left behind."""
        self._free = list(self._buffers)

    def is_used_up(self, numel: int) -> bool:
        """Whether the next one to take a buffer for so many elements makes a new one."""
        return all(buffer.numel() < numel for buffer in self._free)

    def take(self, numel: int) -> torch.Tensor:
        """(at least numel,) the smallest buffer that nobody uses, of several the one that is free longest."""
        if self.is_used_up(numel):
            self._buffers.append(torch.empty_like(self._buffers[0]))
            return self._buffers[-1]
        _, index = min((free.numel(), i) for i, free in enumerate(self._free) if free.numel() >= numel)
        return self._free.pop(index)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Whoever took it has no need of it any more."""
        self._free.append(buffer)
