"""The memory of a rank's parameters: flat buffers, of which the model's parameters are views.

After an update each rank holds new values in its shards. step_schedule.py decides when buckets are gathered.
Parameter versions change when an update begins and ends. So, as with torch's own optimizers, backward raises
an error if autograd saved a parameter too early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from patch.distributed.async_collectives import WaitClock
from patch.distributed.collectives import all_or_none
from patch.layout.buckets import NUM_GATHERED_UNITS
from patch.memory.simulated_device import SimulatedDevice
from patch.optimizer.buckets.buffer_group import BufferGroup, FlatLayout
from patch.optimizer.buckets.flat_params import DetachedFlatParams, FlatParams
from patch.optimizer.buckets.fp8_params import Fp8FlatParams, Fp8Zero3FlatParams
from patch.optimizer.states.sharded_state import StateRange
from patch.optimizer.zero3.sharded_params import UnitVisits, Zero3FlatParams


class ParamBuffer:
    """The parameters of a rank's pipeline stages.

    Args:
        layout: the layout of the parameters, which become views of the buffers and keep their values.
        frozen: the layout of sharded frozen parameters, or None.
    """

    def __init__(self, layout: FlatLayout, frozen: FlatLayout | None, clock: WaitClock) -> None:
        self._bucket_ranges, self._device = layout.bucket_ranges, layout.held.device
        self.flats: list[FlatParams] = [
            _kind_of(buffer_group)(layout, number, clock)
            for number, buffer_group in enumerate(layout.buffer_groups)
        ]
        """Flat buffers of trained parameters, by buffer group."""
        frozen_groups = () if frozen is None else range(len(frozen.buffer_groups))
        self.frozen_flats = [Zero3FlatParams(frozen, number, clock) for number in frozen_groups if frozen]
        self.to_prepare = [flat for flat in self.flats if isinstance(flat, Fp8FlatParams)]
        """Flat buffers for which ranks exchange data before gathers."""
        self.members = [
            [layout.held.parameters[param.parameter] for param in bucket_range.params]
            for bucket_range in layout.bucket_ranges
        ]
        """The parameters with elements in each bucket."""
        every = [*self.flats, *self.frozen_flats]
        self._detached = [flat for flat in every if isinstance(flat, DetachedFlatParams)]
        """Flat buffers whose parameters are not always whole."""
        self.sharded_flats = [flat for flat in self._detached if isinstance(flat, Zero3FlatParams)]
        self.sharded = {
            parameter: flat
            for flat in self.sharded_flats for unit in flat.units for parameter in flat.parameters_of(unit)
        }  # fmt: skip
        """The flat buffer of each parameter that is gathered and freed."""
        self._num_readers = 0

    def flat_of(self, index: int) -> FlatParams:
        """Return the flat buffer of the parameters of a bucket."""
        return self.flats[self._bucket_ranges[index].buffer_group]

    @property
    def is_whole(self) -> bool:
        """Return whether every parameter has its own dtype and all its elements."""
        return all(flat.is_whole for flat in self._detached)

    def check_whole(self) -> None:
        """Refuse to read or write parameters that are not whole, with a TrainingError."""
        for flat in self._detached:
            flat.check_whole()

    def count_units(self, meter: SimulatedDevice) -> None:
        """Let a simulated device count the memory of gathered units."""
        for flat in self.sharded_flats:
            flat.meter = meter

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all parameters with padding, plus this rank's shards if they are separate."""
        return sum(flat.num_bytes for flat in self.flats)

    @property
    def unit_bytes(self) -> int:
        """Return the bytes of the two largest units, the most that are gathered at a time."""
        sizes = Counter[int]()
        for flat in self.sharded_flats:
            sizes.update({unit: flat.unit_bytes(unit) for unit in flat.units})
        return sum(sorted(sizes.values())[-NUM_GATHERED_UNITS:])

    @contextmanager
    def whole(self, *, frozen: bool) -> Iterator[None]:
        """Return a context in which parameters (`frozen`: all) are whole; a collective. Nesting does nothing.

        Raises:
            torch.OutOfMemoryError: this rank has no memory for them.
            PatchError: another rank has no memory.
        """
        with self._gathered([flat for flat in self._detached if frozen or flat in self.flats]):
            yield

    @contextmanager
    def described(self, *, to_write: bool) -> Iterator[UnitVisits | None]:
        """Return a context in which sharded parameters have only shapes, and others are whole; a collective.

        Returns:
            visits that make one unit whole at a time, to read or (`to_write`) write it; None: all are whole.
        """
        sharded = self.sharded_flats
        assert not (sharded and self._num_readers), "meta_weights() inside full_weights()"
        with self._gathered([flat for flat in self._detached if flat not in sharded]):
            visits = UnitVisits(sharded, self._device, is_writing=to_write)
            try:
                yield visits if sharded else None
            finally:
                visits.end()
                for flat in sharded:
                    flat.end_placeholders()

    def own_parts(self) -> tuple[list[StateRange], set[int]]:
        """Return views of this rank's parts of sharded parameters, and the ids of these parameters."""
        parts = [part for flat in self.sharded_flats for part in flat.own_parts()]
        return parts, set(map(id, self.sharded))

    @contextmanager
    def _gathered(self, flats: Sequence[DetachedFlatParams]) -> Iterator[None]:
        with all_or_none():  # includes ranks whose parameters are always whole
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
        """Keep the values of whole parameters, which are equal on all ranks."""
        for flat in self._detached:
            flat.store_whole()

    def leave_whole(self) -> None:
        """Return parameters to the form for training."""
        for flat in self._detached:
            flat.leave_whole()


def _kind_of(buffer_group: BufferGroup) -> type[FlatParams]:
    if buffer_group.gather_dtype is not None:
        return Fp8Zero3FlatParams if buffer_group.stage.shards_parameters else Fp8FlatParams
    is_apart = buffer_group.num_shards > 1 or buffer_group.is_on_host
    is_sharded = buffer_group.stage.shards_parameters and is_apart
    return Zero3FlatParams if is_sharded else FlatParams
