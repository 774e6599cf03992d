"""Weights in one flat buffer, gathered bucket by bucket while the next forward already runs.

The model's parameters are views of the buffer. After the update each rank holds new values in its shards;
`renew` sends them, and the first module that owns a parameter of the bucket waits for it: in its
forward, its `state_dict` (megatron-core's `sharded_state_dict` asks for that) or its `load_state_dict`.
Whoever reads or writes a parameter in another way calls `wait` first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist

from patch.device import streams_of
from patch.distributed.flat import Pending, WaitClock, start_all_gather
from patch.optimizer.layout import BucketRange


class Arrive(Protocol):
    """HybridAdam.arrive."""

    def __call__(self, index: int, *, block: bool) -> bool:
        """Let the current stream wait for new weights; False where they are not written and not `block`."""


class FlatWeights:
    """The weights of a rank's pipeline stages.

    Args:
        stages: modules of them that own parameters get hooks that wait.
        parameters: the trainable ones, one dtype; they become views of the buffer, values kept.
        extents: buckets in the order of backward.
        num_shards: ranks that share a bucket: 1, or the size of `group`.
        arrive: (bucket, block) -> whether this rank's new part of the bucket is there, see HybridAdam.arrive.
        clock: gets the time that compute waits for weights.
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        parameters: list[torch.nn.Parameter],
        extents: list[BucketRange],
        *,
        num_shards: int,
        group: dist.ProcessGroup,
        arrive: Arrive,
        clock: WaitClock,
    ) -> None:
        self._extents, self._group, self._arrive, self._clock = extents, group, arrive, clock
        self._num_shards = num_shards
        self._rank = group.rank() if num_shards > 1 else 0
        self._updating: deque[int] = deque()
        """Buckets whose gathers are not started, in their order, the same on all ranks."""
        self._pending: dict[int, Pending] = {}
        like = parameters[0].detach()
        self.flat = like.new_zeros(extents[-1].end)
        # A gather that starts in the midst of a forward waits for its update, not for what compute has to do.
        self._streams = streams_of(like.device)
        self._aside = self._streams.Stream(like.device) if num_shards > 1 else None
        bucket_of = {}
        with torch.no_grad():
            for index, extent in enumerate(extents):
                for slot in extent.slots:
                    parameter = parameters[slot.parameter]
                    view = self.flat[slot.begin : slot.end].view(parameter.shape)
                    parameter.data = view.copy_(parameter)
                    bucket_of[parameter] = index
        for module in chain.from_iterable(stage.modules() for stage in stages):
            needed = sorted({bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of})
            if needed:
                wait = self._waiter(needed)
                module.register_forward_pre_hook(wait)
                module.register_state_dict_pre_hook(wait)
                module.register_load_state_dict_pre_hook(wait)

    def shard(self, index: int) -> torch.Tensor:
        """This rank's part of a bucket: a view of the buffer."""
        begin, end = self._extents[index].shard(self._rank, self._num_shards)
        return self.flat[begin:end]

    def renew(self, index: int) -> None:
        """This rank's part of a bucket is being updated; once it is there, ranks exchange their parts.

        Returns at once. All ranks renew buckets in the same order.
        """
        if self._aside is not None:
            self._aside.wait_stream(self._streams.current_stream())
        self._updating.append(index)
        self._send()

    def send(self) -> None:
        """Wait until this rank's parts are updated and start what gathers are left; not for other ranks.

        A host that waited for them outside a step could do so for ever: they may wait for its forward.
        """
        if self._updating:
            with self._clock.waiting():
                self._send(self._updating[-1])

    def wait(self) -> None:
        """Wait until every parameter has its new value on this rank."""
        for index in [*self._pending, *self._updating]:
            self._wait_for(index)

    def _send(self, until: int | None = None) -> None:
        """Start the gathers whose turn has come; those up to bucket `until` are waited for."""
        while self._updating:
            index = self._updating[0]
            with nullcontext() if self._aside is None else self._streams.stream(self._aside):
                if not self._arrive(index, block=until in self._updating):
                    return
                self._updating.popleft()
                if self._num_shards > 1:
                    extent = self._extents[index]
                    buffer = self.flat[extent.begin : extent.end]
                    self._pending[index] = start_all_gather(buffer, self.shard(index), self._group)

    def _wait_for(self, index: int) -> None:
        if self._updating:
            with self._clock.waiting():
                self._send(index)
        pending = self._pending.pop(index, None)
        if pending is not None:
            pending.wait(self._clock)

    def _waiter(self, needed: list[int]) -> Callable[..., None]:
        def wait(module: torch.nn.Module, *arguments: Any) -> None:
            for index in needed:
                self._wait_for(index)

        return wait
