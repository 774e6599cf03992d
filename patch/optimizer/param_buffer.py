"""The parameters of a rank in flat buffers, gathered bucket by bucket while the next forward already runs.

The model's parameters are views of the buffers. After the update each rank holds new values in its shards;
`start_param_sync` sends them, and a bucket is waited for by whoever first reads one of its parameters
(param_reads.py). What autograd saved of one too early is an error in backward, as with torch's own
optimizers: versions change when an update begins and when it ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from itertools import chain
from typing import ClassVar

import torch
from torch.autograd.graph import increment_version

from patch.compat.torch_internals import region
from patch.device import stream_of, streams_of
from patch.distributed.async_collectives import Pending, WaitClock, queued_on, start_all_gather
from patch.optimizer.domain import FlatLayout
from patch.optimizer.eight_bit_flat import EightBitFlat


class ParamBuffer:
    """The parameters of a rank's pipeline stages.

    Args:
        layout: of the parameters; they become views of the buffers, values kept.
        wait_for_update: lets the current stream wait for this rank's new part of a bucket; False where it is
            not there yet and the second argument, whether to block this thread, is false.
        clock: gets the time that compute waits for parameters.
    """

    _with_gathers_left: ClassVar[set[ParamBuffer]] = set()
    """Those of this process with gathers that are to start. Held: other ranks expect them also of a model
    that nobody here needs any more."""

    def __init__(
        self, layout: FlatLayout, wait_for_update: Callable[[int, bool], bool], clock: WaitClock
    ) -> None:
        bucket_ranges, domains = self._bucket_ranges, self._domains = layout.bucket_ranges, layout.domains
        self._wait_for_update, self._clock = wait_for_update, clock
        parameters, device = layout.trained.parameters, layout.trained.device
        self._updating: deque[int] = deque()
        """Buckets whose gathers are not started, in their order, the same on all ranks."""
        self._pending: dict[int, Pending] = {}
        self.is_settled = True
        """Whether every parameter has its new value: nobody has to wait."""
        self._lock = threading.RLock()
        """Threads that share a model may wait for the same parameters."""
        self.flats: list[torch.Tensor] = []
        """The flat buffer of each domain; bytes where parameters are gathered in 8 bits."""
        for domain, numel in zip(domains, layout.numels, strict=True):
            self.flats.append(torch.zeros(numel, dtype=domain.dtype, device=device))
        # A gather that starts in the midst of a forward waits for its update, not for what compute has to do.
        self._device, self._streams = device, streams_of(device)
        is_sharded = any(domain.num_shards > 1 for domain in domains)
        self._aside = stream_of(device, "gathers") if is_sharded else None
        self._members = [
            [parameters[param.parameter] for param in bucket_range.params] for bucket_range in bucket_ranges
        ]
        with torch.no_grad():
            for index, bucket_range in enumerate(bucket_ranges):
                for param, parameter in zip(bucket_range.params, self._members[index], strict=True):
                    if param.offset == 0:  # its other parts follow without gaps
                        whole = self.flats[bucket_range.domain].narrow(0, param.begin, parameter.numel())
                        parameter.data = whole.view(parameter.shape).copy_(parameter)
        layout.trained.note(parameters)
        self.in_8_bits: dict[int, EightBitFlat] = {}
        """By domain: those that are gathered in 8 bits."""
        for number, domain in enumerate(domains):
            if domain.gathered_as is not None:
                ranges = {index: r for index, r in enumerate(bucket_ranges) if r.domain == number}
                values = torch.zeros(self.flats[number].numel(), dtype=torch.uint8, device=device)
                flat = EightBitFlat(parameters, ranges, domain, values, self.flats[number], clock)
                self.in_8_bits[number], self.flats[number] = flat, values

    def shard(self, index: int) -> torch.Tensor:
        """This rank's part of a bucket: a view of the buffer, if parameters travel in their own type."""
        bucket_range = self._bucket_ranges[index]
        if bucket_range.domain in self.in_8_bits:
            return self.in_8_bits[bucket_range.domain].shard(index)
        begin, end = self._domains[bucket_range.domain].own(bucket_range)
        return self.flats[bucket_range.domain][begin:end]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters, padding included, and of this rank's shards where these are not views."""
        shards = sum(flat.own.nbytes for flat in self.in_8_bits.values())
        return shards + sum(flat.nbytes for flat in self.flats)

    def update_in_turns(self, update: Callable[[list[int]], None]) -> None:
        """Let this rank's parts of buckets be updated, and send each turn's while the next is updated.

        The next forward needs the last bucket of backward first. Where ranks share buckets, the first gather
        starts at once, and few calls are made for the others: turns are of one unit, two, four, ...

        Args:
            update: updates this rank's parts of some buckets.
        """
        units = self._units()[::-1]
        begin, size = 0, 1 if self._domains[0].sharding.shares_states else len(units)
        while begin < len(units):
            indices = list(chain.from_iterable(units[begin : begin + size]))
            update(indices)
            self._start_scales(indices)
            for index in indices:
                self.start_param_sync(index)
            begin, size = begin + size, 2 * size
        self._start_scales([])

    def _units(self) -> list[list[int]]:
        """The buckets in their order; those together that hold parts of one parameter and need one scale."""
        units: list[list[int]] = []
        last: int | None = None
        for index, bucket_range in enumerate(self._bucket_ranges):
            parameter = bucket_range.params[-1].parameter if bucket_range.params else None
            if bucket_range.domain in self.in_8_bits and parameter is not None and parameter == last:
                units[-1].append(index)
            else:
                units.append([index])
            last = parameter
        return units

    def _start_scales(self, indices: Sequence[int]) -> None:
        """Ranks exchange the scales of what is gathered in 8 bits; call when these buckets are updated.

        The gathers of the buckets of the call before start now, since their scales have arrived meanwhile.

        Args:
            indices: whole `units`, the last one first; none: the update is complete.
        """
        if not self.in_8_bits:
            return
        if self._aside is not None:
            self._aside.wait_stream(self._streams.current_stream())
        with self._lock:
            before = list(self._updating)
            with nullcontext() if self._aside is None else self._streams.stream(self._aside):
                for number, flat in self.in_8_bits.items():
                    flat.start_scales([i for i in indices if self._bucket_ranges[i].domain == number])
            if before:
                self._start_gathers(before[-1])
            self._note_settled()

    def start_param_sync(self, index: int) -> None:
        """Take note that this rank's part of a bucket is being updated; then ranks exchange their parts.

        Returns at once. All ranks call it for all buckets in the same order.
        """
        self.start_gathers_of_others()
        if self._aside is not None:
            self._aside.wait_stream(self._streams.current_stream())
        with self._lock:
            increment_version(self._members[index])
            self._updating.append(index)
            self._start_gathers()
            self._note_settled()

    def finish_before_backward(self) -> None:
        """Before gradients are overwritten: modules that forward did not use have not waited for updates."""
        self.finish_param_sync()
        self.start_gathers_of_others()

    def start_all_gathers(self) -> None:
        """Wait until this rank's parts are updated, and start the gathers that are left.

        No other rank is waited for. A host that did so outside a step could wait for ever: the others may
        wait for its forward.
        """
        with self._lock:
            if self._updating:
                with self._clock.waiting():
                    self._start_gathers(self._updating[-1])
            self._note_settled()

    def start_gathers_of_others(self) -> None:
        """Start all gathers of the program's other models: call before messages of this one.

        Each rank starts gathers when its own host has updated, and models may share a group, whose messages
        need one order on all ranks.
        """
        for other in self._with_gathers_left - {self}:
            other.start_all_gathers()

    def finish_param_sync(self) -> None:
        """Wait until every parameter has its new value on this rank."""
        if not self.is_settled:
            self.wait_for([*self._pending, *self._updating])

    def _start_gathers(self, up_to: int | None = None) -> None:
        """Start the gathers up to that of a bucket, and those whose turn has come by then.

        That is as far as this rank's updates are done.
        """
        while self._updating and self._start_next_gather(block=up_to in self._updating):
            pass

    def _start_next_gather(self, *, block: bool) -> bool:
        """Start the gather whose turn it is; False where its update is not done yet and `block` is False."""
        index = self._updating[0]
        with nullcontext() if self._aside is None else self._streams.stream(self._aside):
            bucket_range = self._bucket_ranges[index]
            in_8_bits = self.in_8_bits.get(bucket_range.domain)
            if in_8_bits is not None and not (block or in_8_bits.has_scales(index)):
                return False
            if not self._wait_for_update(index, block):
                return False
            self._updating.popleft()
            domain = self._domains[bucket_range.domain]
            if in_8_bits is not None:
                with region("bucket %d all-gather in 8 bits", index):
                    self._pending[index] = in_8_bits.start_gather(index)
            elif domain.num_shards > 1:
                buffer = self.flats[bucket_range.domain][bucket_range.begin : bucket_range.end]
                with region("bucket %d all-gather", index):
                    self._pending[index] = start_all_gather(buffer, self.shard(index), domain.instance)
            elif self._aside is None:
                increment_version(self._members[index])
            else:  # nobody else has a part, but compute has not waited for the update, only the stream aside
                self._pending[index] = queued_on(self._aside, self._device)
        return True

    def wait_for(self, indices: Iterable[int]) -> None:
        """Wait until the parameters of these buckets have their new values on this rank."""
        with self._lock:
            for index in indices:
                if self._updating:
                    with self._clock.waiting():
                        self._start_gathers(index)
                pending = self._pending.pop(index, None)
                if pending is not None:
                    pending.wait(self._clock)
                    increment_version(self._members[index])
            self._note_settled()

    def _note_settled(self) -> None:
        if self._updating and self._aside is not None:
            self._with_gathers_left.add(self)
        else:
            self._with_gathers_left.discard(self)
        self.is_settled = not self._updating and not self._pending
