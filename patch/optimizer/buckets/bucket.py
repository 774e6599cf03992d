"""One bucket of gradients, which collects and reduces them; staging buffers for buckets."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch

from patch.distributed.async_collectives import CommHandle, RoundedSums, WaitClock
from patch.layout.buckets import BucketRange, ParamRange
from patch.optimizer.buckets.buffer_group import BufferGroup


class BucketState(Enum):
    """The progress of the newest micro-batch of the bucket's stage."""

    ACCUMULATING = auto()
    """Gradients are added; a later micro-batch reduces them. Also before the first micro-batch of a step."""
    FILLING = auto()
    """Gradients are added, and reduced as soon as all are here."""
    COMPLETE = auto()
    """No further gradient comes; some parameters may have none."""
    REDUCED = auto()
    """The reduction has started."""


class Bucket:
    """The gradients of the parameters of one bucket.

    In each micro-batch: `begin_micro_batch`, `collect` for every gradient, `end_micro_batch`. When the bucket
    is ready: `complete`, `start_grad_sync`, `finish_grad_sync`. Between two steps: `reset`.

    Args:
        index: position of the bucket in the order of backward.
        shard: (n,) this rank's reduced gradients; final when the schedule's `finish_grad_sync` returns.
        buffer: (shards * n,) where gradients are collected; None: in a staging buffer, see `use_staging`.
        rounded_sums: reduces over NCCL in a narrower dtype, or None.
    """

    def __init__(
        self,
        index: int,
        bucket_range: BucketRange,
        shard: torch.Tensor,
        buffer: torch.Tensor | None,
        buffer_group: BufferGroup,
        rounded_sums: RoundedSums | None = None,
    ) -> None:
        self.index, self.range, self.shard = index, bucket_range, shard
        self.buffer_group, self._rounded_sums = buffer_group, rounded_sums
        self._places_in: dict[int, dict[ParamRange, torch.Tensor]] = {}
        """Views of each buffer that collects gradients, by its address. Buffers are never freed, so views are
        cached: making a view takes as long as adding a gradient."""
        self._set_buffer(buffer)
        self._staging: torch.Tensor | None = None
        self.state = BucketState.ACCUMULATING
        self.is_last = False
        """Whether the stage's newest micro-batch is the last micro-batch of the step."""
        self.pending: CommHandle | None = None
        """The reduction in flight, which may be that of the micro-batch before the newest."""
        self._to_add: torch.Tensor | None = None
        """The sum of a micro-batch that is still to be added to the shard, or None."""
        self._missing: set[ParamRange] = set()
        self._unused = set(bucket_range.params)
        self._has_nested = self._has_repeats = False
        """Whether a gradient came from a nested backward; whether a parameter got several in a
        micro-batch."""
        self.reset()

    def reset(self) -> None:
        """Drop the gradients of the previous step."""
        self.state, self._is_shard_empty = BucketState.ACCUMULATING, True
        self.drop_staging()
        self._unwritten = set(self.range.params)
        """Parameters that have no gradient in the buffer yet: their elements hold old values."""

    def begin_micro_batch(self, *, is_last: bool) -> None:
        """Begin the backward of a micro-batch of the stage."""
        self._missing, self.is_last = set(self.range.params), is_last
        is_due = is_last or self.buffer_group.stage.shards_gradients
        self.state = BucketState.FILLING if is_due else BucketState.ACCUMULATING

    def close(self) -> None:
        """Record that the rest of backward brings no gradients for this bucket."""
        if self.state is BucketState.FILLING:
            self.state = BucketState.COMPLETE

    def end_micro_batch(self) -> None:
        """Record that the micro-batch has ended."""
        self._unused &= self._missing
        self.close()

    @property
    def is_ready(self) -> bool:
        """Return whether the micro-batch needs a reduction and brings no further gradient."""
        if self.state is not BucketState.FILLING:
            return self.state is BucketState.COMPLETE
        return not (self._missing or self._has_repeats or (self._has_nested and self._unused))

    def is_missing(self, param: ParamRange) -> bool:
        """Return whether the micro-batch has brought no gradient of a parameter yet."""
        return param in self._missing

    def use_staging(self, staging: torch.Tensor) -> None:
        """Collect the next gradients in `staging`, until `drop_staging`."""
        self._staging = staging
        self._set_buffer(staging[: self.range.numel])
        self._unwritten = set(self.range.params)

    def _set_buffer(self, buffer: torch.Tensor | None) -> None:
        self.buffer = buffer
        self._places = {} if buffer is None else self._places_in.setdefault(buffer.data_ptr(), {})

    def drop_staging(self) -> torch.Tensor | None:
        """Return the staging buffer, which is free now, or None if there was none."""
        staging, self._staging = self._staging, None
        if staging is not None:
            self._set_buffer(None)
        return staging

    def open_place(self, param: ParamRange) -> tuple[torch.Tensor, bool]:
        """Return where to write the parameter's next gradient, flat, and whether to overwrite old values."""
        return self._elements(param), self._open(param)

    def _open(self, param: ParamRange) -> bool:
        """Record that a gradient is being written; return whether it is the parameter's first gradient."""
        is_first = param in self._unwritten
        self._unwritten.discard(param)
        return is_first

    @property
    def _collected(self) -> torch.Tensor:
        assert self.buffer is not None, "use_staging comes first"
        return self.buffer

    def _elements(self, param: ParamRange) -> torch.Tensor:
        return self._collected[param.begin - self.range.begin : param.end - self.range.begin]

    def collect(self, param: ParamRange, gradient: torch.Tensor | None, *, is_nested: bool) -> None:
        """Add the gradient of one parameter, or of its part in this bucket, to the buffer.

        Args:
            gradient: None: a layer has already written it to its place (`open_place`).
            is_nested: it comes from a nested backward (a reentrant checkpoint).
        """
        if gradient is not None:
            place = self._places.get(param)
            if place is None:
                place = self._places[param] = self._elements(param).view(gradient.shape)
            if gradient.requires_grad:  # drop the graph, which backward keeps with create_graph
                gradient = gradient.detach()
            if self._open(param):
                place.copy_(gradient)
            else:
                place.add_(gradient)
        self._has_repeats |= param not in self._missing
        # A staged bucket cannot wait for repeated gradients: staging memory does not hold all buckets.
        self._has_nested |= is_nested and not self.buffer_group.stage.shards_gradients
        self._missing.discard(param)

    @property
    def is_shard_final(self) -> bool:
        """Return whether the reduction writes the final sum directly into the shard."""
        if self.buffer_group.is_on_host:
            return False
        return not self.buffer_group.is_staged or self._is_shard_empty

    def complete(self) -> None:
        """Zero the gradients of unused parameters, and padding, before the reduction."""
        for param in self._unwritten:
            self._elements(param).zero_()
        if self._staging is not None:  # it holds values of another bucket, or uninitialized memory
            end = max((param.end for param in self.range.params), default=self.range.begin)
            self._collected[end - self.range.begin :].zero_()

    def is_finite(self) -> bool:
        """Return whether all collected gradients are finite; waits for the device."""
        return bool(self._collected.isfinite().all())

    def start_grad_sync(self) -> None:
        """Start the reduction of the collected gradients."""
        group, self._to_add = self.buffer_group, None if self.is_shard_final else self._own_part()
        out = self.shard if self._to_add is None else self._to_add
        self.pending = group.start_reduction(self._collected, out, self._rounded_sums)
        if group.replica_group is not None and self.is_last:
            self.pending = self.pending.chain(self._sum_over_replicas, group.shard_group, self.shard.device)
        self.state = BucketState.REDUCED

    def _sum_over_replicas(self) -> CommHandle:
        """All-reduce this step's shard over the shard groups."""
        self._add_to_shard()
        return self.buffer_group.start_sum_over_replicas(self.shard)

    def _add_to_shard(self) -> None:
        own, self._to_add = self._to_add, None
        if own is None:
            return
        if self.buffer_group.is_on_host:  # the device sums, so that no thread waits for it
            if not self._is_shard_empty:
                own.add_(self.shard.to(own.device, non_blocking=True))
            self.shard.copy_(own, non_blocking=True)
        else:
            self.shard.add_(own)

    def finish_grad_sync(self, clock: WaitClock) -> None:
        """Wait for the reduction."""
        assert self.pending is not None, "start_grad_sync comes first"
        self.pending.wait(clock)
        self.pending = None
        self._add_to_shard()
        self._is_shard_empty = False

    def _own_part(self) -> torch.Tensor:
        own = self.buffer_group.own(self.range)
        return self._collected[own.start - self.range.begin : own.stop - self.range.begin]


class Staging:
    """Buffers that stage buckets if a rank keeps only its shards (stage `gradients`).

    Buffers are added only if unused parameters or several buffer groups hold buckets open while others fill.

    Args:
        like: a tensor on the device, with the dtype of gradients.
        numels: elements of the buffers, the first for the largest bucket. Their number limits the buckets
            that are open or in reduction at a time.
    """

    def __init__(self, like: torch.Tensor, numels: Sequence[int]) -> None:
        self._buffers = [like.new_empty(numel) for numel in numels]
        self.reset()

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def reset(self) -> None:
        """Begin a step: all buffers are free, even after an error."""
        self._free = list(self._buffers)

    def is_used_up(self, numel: int) -> bool:
        """Return whether `take(numel)` would allocate a new buffer."""
        return all(buffer.numel() < numel for buffer in self._free)

    def take(self, numel: int) -> torch.Tensor:
        """Take the smallest free buffer of at least `numel` elements; of several, the longest unused."""
        if self.is_used_up(numel):
            self._buffers.append(torch.empty_like(self._buffers[0]))
            return self._buffers[-1]
        _, index = min((free.numel(), i) for i, free in enumerate(self._free) if free.numel() >= numel)
        return self._free.pop(index)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that `take` returned."""
        self._free.append(buffer)
