"""The parameters of a rank in flat buffers, gathered bucket by bucket while the next forward already runs.

The model's parameters are views of the buffers. After the update each rank holds new values in its shards;
`start_param_sync` sends them, and a bucket is waited for by whoever first reads one of its parameters
(param_reads.py). What autograd saved of one too early is an error in backward, as with torch's own
optimizers: versions change when an update begins and when it ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import ClassVar

from torch.autograd.graph import increment_version

from patch.device import stream_of, streams_of
from patch.distributed.async_collectives import Pending, WaitClock, queued_on
from patch.distributed.collectives import all_or_none
from patch.memory import SimulatedDevice
from patch.optimizer.domain import Domain, FlatLayout
from patch.optimizer.eight_bit_flat import EightBitFlat, EightBitUnits
from patch.optimizer.param_flat import ParamFlat
from patch.optimizer.sharded_flat import ShardedFlat, UnitVisits
from patch.optimizer.sharded_state import StateRange


class ParamBuffer:
    """The parameters of a rank's pipeline stages.

    Args:
        layout: of the parameters; they become views of the buffers, values kept.
        frozen: of those that are not trained and are shared all the same.
        wait_for_update: lets the current stream wait for this rank's new part of a bucket; False where it is
            not there yet and the second argument, whether to block this thread, is false.
        clock: gets the time that compute waits for parameters.
    """

    _with_gathers_left: ClassVar[set[ParamBuffer]] = set()
    """Buffers of this process with gathers still to start. Held: other ranks expect them also of a model
    that nobody here needs any more."""

    def __init__(
        self,
        layout: FlatLayout,
        frozen: FlatLayout | None,
        wait_for_update: Callable[[int, bool], bool],
        clock: WaitClock,
    ) -> None:
        bucket_ranges, domains = self._bucket_ranges, self._domains = layout.bucket_ranges, layout.domains
        self._wait_for_update, self._clock = wait_for_update, clock
        parameters, device = layout.held.parameters, layout.held.device
        self.parameters = parameters
        self._updating: deque[int] = deque()
        """Buckets whose gathers are not started, in their order, the same on all ranks."""
        self._pending: dict[int, Pending] = {}
        self.is_settled = True
        """Whether every parameter has its new value: nobody has to wait."""
        self._lock = threading.RLock()
        """Threads that share a model may wait for the same parameters."""
        self.flats: list[ParamFlat] = [
            _kind_of(domain)(layout, number, clock) for number, domain in enumerate(domains)
        ]
        """By domain."""
        frozen_domains = () if frozen is None else range(len(frozen.domains))
        self.frozen_flats = [ShardedFlat(frozen, number, clock) for number in frozen_domains if frozen]
        """Likewise, of what is never updated."""
        self._num_readers = 0
        """Contexts of whole weights that are open."""
        # A gather that starts in the midst of a forward waits for its update, not for what compute has to do.
        self._device, self._streams = device, streams_of(device)
        is_sharded = any(domain.num_shards > 1 for domain in domains)
        self._aside = stream_of(device, "gathers") if is_sharded else None
        self._members = [
            [parameters[param.parameter] for param in bucket_range.params] for bucket_range in bucket_ranges
        ]

    def flat_of(self, index: int) -> ParamFlat:
        """The flat buffer of the parameters of a bucket."""
        return self.flats[self._bucket_ranges[index].domain]

    @property
    def is_whole(self) -> bool:
        """Whether every parameter has its own type and all its elements."""
        return all(flat.is_whole for flat in self._all_flats)

    def check_whole(self) -> None:
        """Refuse to read or write parameters that are not whole.

        Raises:
            TrainingError: they are not.
        """
        for flat in self._all_flats:
            flat.check_whole()

    def is_updated(self, indices: Sequence[int]) -> bool:
        """Whether this rank's parts of buckets are updated, or compute alone has to wait for that."""
        with self._lock:
            self._start_gathers()
            return not any(index in self._updating for index in indices)

    def count_units(self, meter: SimulatedDevice) -> None:
        """Let a simulated device count the memory of parameters that come and go."""
        for flat in self._sharded_flats:
            flat.meter = meter

    @property
    def num_bytes(self) -> int:
        """Bytes of all parameters, padding included, and of this rank's shards where these are not views."""
        return sum(flat.num_bytes for flat in self.flats)

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
            self._prepare(indices)
            for index in indices:
                self.start_param_sync(index)
            begin, size = begin + size, 2 * size
        self._prepare([])

    def _units(self) -> list[list[int]]:
        """The buckets in their order; those together that hold parts of one parameter and are prepared."""
        units: list[list[int]] = []
        last: int | None = None
        for index, bucket_range in enumerate(self._bucket_ranges):
            parameter = bucket_range.params[-1].parameter if bucket_range.params else None
            if self.flat_of(index).needs_preparation and parameter is not None and parameter == last:
                units[-1].append(index)
            else:
                units.append([index])
            last = parameter
        return units

    def _prepare(self, indices: Sequence[int]) -> None:
        """Let flats tell other ranks what these need before buckets are gathered; call when they are updated.

        The gathers of the buckets of the call before start now, since their preparation is done meanwhile.

        Args:
            indices: whole `units`, the last one first; none: the update is complete.
        """
        flats = [flat for flat in self.flats if flat.needs_preparation]
        if not flats:
            return
        if self._aside is not None:
            self._aside.wait_stream(self._streams.current_stream())
        with self._lock:
            before = list(self._updating)
            with nullcontext() if self._aside is None else self._streams.stream(self._aside):
                for flat in flats:
                    flat.prepare(indices)
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
            flat = self.flat_of(index)
            if not ((block or flat.is_prepared(index)) and self._wait_for_update(index, block)):
                return False
            self._updating.popleft()
            pending = flat.start_gather(index)
            if pending is None and self._aside is not None:
                # Nobody else has a part, but compute has not waited for the update, only the stream aside.
                pending = queued_on(self._aside, self._device)
            if pending is None:
                increment_version(self._members[index])
            else:
                self._pending[index] = pending
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

    @contextmanager
    def whole(self, *, frozen: bool) -> Iterator[None]:
        """Context in which parameters are whole; a collective over the job. Others inside it change nothing.

        Args:
            frozen: also those that are not trained.
        Raises:
            torch.OutOfMemoryError: one rank has no memory for them; PatchError on the others.
        """
        with self._gathered(self._all_flats if frozen else self.flats):
            yield

    @contextmanager
    def described(self, *, to_write: bool) -> Iterator[UnitVisits | None]:
        """Context in which parameters in shards have shapes only, and all others are whole; a collective.

        Args:
            to_write: who visits a parameter writes it, instead of reading it.
        Returns:
            the visits that make one unit whole at a time; None: all parameters are whole.
        """
        sharded = self._sharded_flats
        assert not (sharded and self._num_readers), "within whole weights nobody needs a description"
        with self._gathered([flat for flat in self._all_flats if flat not in sharded]):
            visits = UnitVisits(sharded, self._device, is_writing=to_write)
            try:
                yield visits if sharded else None
            finally:
                visits.end()
                for flat in sharded:
                    flat.end_description()

    def own_parts(self) -> tuple[list[StateRange], set[int]]:
        """This rank's parts of parameters of which it keeps no more: views; and ids of the parameters."""
        sharded = self._sharded_flats
        ids = {id(parameter) for flat in sharded for parameter in flat.in_shards()}
        return [part for flat in sharded for part in flat.own_parts()], ids

    @property
    def _all_flats(self) -> list[ParamFlat]:
        return [*self.flats, *self.frozen_flats]

    @property
    def _sharded_flats(self) -> list[ShardedFlat]:
        return [flat for flat in self._all_flats if isinstance(flat, ShardedFlat)]

    @contextmanager
    def _gathered(self, flats: Sequence[ParamFlat]) -> Iterator[None]:
        """Context in which the parameters of these domains are whole."""
        self.finish_param_sync()
        with all_or_none():  # also over ranks whose parameters always are, which would go on alone
            found = [(flat, memory) for flat in flats if (memory := flat.new_whole()) is not None]
        for flat, memory in found:
            flat.gather_whole(memory)
        self._num_readers += 1
        try:
            yield
        finally:
            self._num_readers -= 1
            if not self._num_readers:
                self.leave_whole()

    def store_whole(self) -> None:
        """Keep what whole parameters hold now, the same on all ranks."""
        for flat in self._all_flats:
            flat.store_whole()

    def leave_whole(self) -> None:
        """Let parameters have the form that they train in."""
        for flat in self._all_flats:
            flat.leave_whole()

    def _note_settled(self) -> None:
        if self._updating and self._aside is not None:
            self._with_gathers_left.add(self)
        else:
            self._with_gathers_left.discard(self)
        self.is_settled = not self._updating and not self._pending


def _kind_of(domain: Domain) -> type[ParamFlat]:
    if domain.gathered_as is not None:
        return EightBitUnits if domain.sharding.stage.shares_parameters else EightBitFlat
    is_apart = domain.num_shards > 1 or domain.is_on_host
    is_sharded = domain.sharding.stage.shares_parameters and is_apart
    return ShardedFlat if is_sharded else ParamFlat
