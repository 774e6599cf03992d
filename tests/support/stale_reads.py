"""Alarm for tests: an operation on the memory of weights whose update or gather is pending is an error.

Unlike the optimizer's own checks it sees every torch operation, below autograd, on any tensor of that memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode
from torch.utils._pytree import tree_leaves

from patch.optimizer import OverlappedDistributedOptimizer
from patch.optimizer.zero3.sharded_params import Zero3FlatParams


class StaleReadError(AssertionError):
    """A weight was read or written before its new value was there."""


class _Alarm(TorchDispatchMode):
    def __init__(self, optimizer: OverlappedDistributedOptimizer) -> None:
        super().__init__()
        self._weights, self._schedule = optimizer.param_buffer, optimizer.schedule
        self._names = {id(parameter): name for name, parameter in optimizer._trained.named}
        self._storages = [
            None if isinstance(flat, Zero3FlatParams) else flat.buffer.untyped_storage().data_ptr()
            for flat in self._weights.flats
        ]
        """Address of each buffer group. None: sharded weights, which are NaN until they are gathered."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compile nothing; torch's guard takes longer than the check itself."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence, args: Sequence = (), kwargs: dict | None = None
    ) -> Any:
        # Views read nothing. Messages are allowed, because they bring the weights.
        if not self._schedule.is_settled and func.namespace == "aten" and not func.is_view:
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor):
                    self._check(tensor, func)
        return func(*args, **(kwargs or {}))

    def _check(self, tensor: torch.Tensor, func: Any) -> None:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in self._storages or not tensor.numel():
            return
        weights, begin = self._weights, tensor.storage_offset()
        for index in {*self._schedule.pending, *self._schedule.updating}:
            bucket_range = weights._bucket_ranges[index]
            is_here = storage == self._storages[bucket_range.buffer_group]
            for param, member in zip(bucket_range.params, weights.members[index], strict=True):
                if is_here and param.begin <= begin < param.end:
                    raise StaleReadError(f"{func} on {self._names[id(member)]}, which is on its way")


@contextmanager
def no_stale_reads(optimizer: OverlappedDistributedOptimizer) -> Iterator[None]:
    """Raise StaleReadError if this thread touches weights of `optimizer` that are still pending.

    It does nothing on a fake device, which is a dispatch mode itself: there the optimizer's own copies run in
    this thread. It also does nothing if a rank updates all weights itself and at once.
    """
    is_sharded = any(bucket.buffer_group.num_shards > 1 for bucket in optimizer.grad_buffer.buckets)
    is_needed = (is_sharded or optimizer.placement.is_offloading) and not is_in_torch_dispatch_mode()
    with _Alarm(optimizer) if is_needed else nullcontext():
        yield
