"""When weights are gathered and freed (ZeRO stage `parameters`).

A unit is what comes and goes together: the parameters of one module (`unit_modules`), mostly a layer's.

    forward   whole from the module's forward on, freed after it
    backward  whole from the gradient of the module's output on, freed when all its gradients are collected;
              where the module is computed again, from then on

Its messages travel while the unit before it is computed.

Each forward, and each backward, of a stage is a pass. Ranks gather all units of a stage in each pass, in one
order: who needs one also gathers those before it, and the end of a pass those that are left. So ranks of
which some leave a module out send the same messages. A unit that is needed again after it was freed is
gathered in another pass, on all ranks or none.

A weight that is read outside of its module (a tied embedding, a head whose loss reads it) is whole to the end
of its stage's forward, and from the beginning of its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from patch.compat.torch_internals import call_at_end_of_backward, current_backward
from patch.device import stream_of, streams_of
from patch.distributed.async_collectives import Pending, WaitClock
from patch.errors import TrainingError
from patch.layout.buckets import NUM_WHOLE, BucketRange
from patch.optimizer.domain import FlatLayout
from patch.optimizer.micro_batch import NO_BACKWARD, tensors_in
from patch.optimizer.param_buffer import ParamBuffer
from patch.optimizer.sharded_flat import ShardedFlat
from patch.optimizer.trained import UnitModule, unit_modules


class _Unit:
    """Parameters that come and go together; see `UnitModule`."""

    def __init__(self, number: int, stage: int, place_in_backward: int) -> None:
        self.number, self.stage, self.place_in_backward = number, stage, place_in_backward
        self.buckets: list[int] = []
        self.flats: list[ShardedFlat] = []
        self.parameters: set[int] = set()
        """The indices of parameters that are trained."""
        self.pending: list[Pending] | None = None
        """The gathers under way."""
        self.is_here = False
        """Whether the parameters are whole."""
        self.has_frozen = False
        """Whether some of the parameters are not trained: no gradient tells when backward is through."""
        self.is_around = False
        """Whether its module has others in it."""
        self.skips_backward = False
        """Whether backward needs no values: an embedding's does not."""
        self.num_forwards = 0
        """Forwards of the module that are under way."""
        self.is_read_outside = False
        """Whether anybody ever read one outside of them."""
        self.missing: set[int] = set()
        """Parameters without a gradient since they were gathered."""
        self.awaited: Counter[int] = Counter()
        """By the number of the stage's forward: outputs of the module whose gradient has not come."""

    def is_over(self, forward: int | None) -> bool:
        """Whether backward, which has come to a later output of that forward, needs it no more; None: ended.

        Graphs of later forwards are other micro-batches', those of earlier ones may be of the same.
        """
        return (
            forward is None
            or not (self.is_around or self.is_read_outside)
            and all(number > forward for number in self.awaited)
        )


class _Pass:
    """A forward or a backward of one stage."""

    def __init__(self, stage: int, order: list[_Unit], *, is_backward: bool) -> None:
        self.stage, self.is_backward = stage, is_backward
        self.left = order
        """Units that are not gathered yet, in their order."""
        self.begun: list[_Unit] = []


class ParamUnits:
    """The units of a rank's pipeline stages.

    Args:
        layout: of what is trained.
        frozen: of frozen parameters that come and go, too.
        buffer: of both.
        clock: gets the time that compute waits for gathers.
        before_forward: called before the messages of a stage's forward.
        on_passed: called with buckets to which backward brings no further gradient.
    """

    def __init__(
        self,
        layout: FlatLayout,
        frozen: FlatLayout | None,
        buffer: ParamBuffer,
        clock: WaitClock,
        *,
        before_forward: Callable[[], None],
        on_passed: Callable[[list[int]], None],
    ) -> None:
        self._before_forward, self._on_passed = before_forward, on_passed
        self._buffer, self._clock, device = buffer, clock, layout.held.device
        modules = unit_modules(layout.held.stages)
        units = [_Unit(index + 1, each.stage, each.place_in_backward) for index, each in enumerate(modules)]
        self._unit_of: dict[torch.Tensor, _Unit] = {}
        for index, bucket_range in enumerate(layout.bucket_ranges):
            flat = buffer.flat_of(index)
            if bucket_range.unit and isinstance(flat, ShardedFlat):
                unit = units[bucket_range.unit - 1]
                unit.buckets.append(index)
                unit.parameters |= {param.parameter for param in bucket_range.params}
                self._add(unit, flat, layout, bucket_range)
        for bucket_range in () if frozen is None else frozen.bucket_ranges:
            assert frozen is not None
            unit = units[bucket_range.unit - 1]
            unit.has_frozen = True
            self._add(unit, buffer.frozen_flats[bucket_range.domain], frozen, bucket_range)
        self._units = [unit for unit in units if unit.flats]
        self._pass: _Pass | None = None
        self._stage: int | None = None
        """The stage whose forward is under way, outside of any backward."""
        self._num_forwards = 0
        """Running forwards of all stages."""
        self._num_ahead: Counter[int] = Counter()
        """By stage: forwards of the step without a backward so far."""
        if not self._units:
            return
        self._streams, self._aside = streams_of(device), stream_of(device, "gathers")
        self._ends = _ends_of_buckets(layout, modules, units)
        for unit in self._units:
            module = modules[unit.number - 1].module
            unit.is_around = modules[unit.number - 1].is_around
            unit.skips_backward = type(module) in (torch.nn.Embedding, VocabParallelEmbedding)
            self._follow(module, unit)
        for number, stage in enumerate(layout.held.stages):
            self._follow_stage(stage, number)

    def _add(self, unit: _Unit, flat: ShardedFlat, layout: FlatLayout, bucket_range: BucketRange) -> None:
        """A bucket belongs to a unit."""
        if flat not in unit.flats:
            unit.flats.append(flat)
        for param in bucket_range.params:
            self._unit_of[layout.held.parameters[param.parameter]] = unit

    def flats_of(self, parameters: Iterable[torch.nn.Parameter]) -> set[ShardedFlat]:
        """The flat buffers of parameters that are gathered and freed."""
        return {
            flat for parameter in parameters if parameter in self._unit_of
            for flat in self._unit_of[parameter].flats
        }  # fmt: skip

    # Who needs what.

    def read(self, parameter: torch.nn.Parameter | None) -> None:
        """Somebody reads a parameter by its name.

        Raises:
            TrainingError: it is freed, and no rank may gather it alone now.
        """
        unit = self._unit_of.get(parameter) if parameter is not None else None
        if unit is None or unit.num_forwards or self._buffer.is_whole:
            return
        if self._stage is None and current_backward() == NO_BACKWARD:
            self._buffer.check_whole()
            return
        unit.is_read_outside |= self._stage is not None
        self._need(unit)

    def begin_backward(self, stage: int) -> None:
        """A stage's backward begins, or its turn comes to have none, and perhaps no forward before it."""
        if not self._is_sharded or self._is_in(stage, is_backward=True):
            return
        if current_backward() == NO_BACKWARD and self._num_ahead[stage] < 1:
            self._begin(stage, is_backward=False)
        self._begin(stage, is_backward=True)

    def begin_step(self) -> None:
        """Forget the forwards before: they were no part of it."""
        self.end_pass()
        self._num_ahead.clear()
        for unit in self._units:
            unit.awaited.clear()

    def collected(self, parameter: int) -> None:
        """The gradient of a parameter, by its index, has been collected."""
        unit = self._unit_of.get(self._buffer.parameters[parameter])
        if unit is None:
            return
        unit.missing.discard(parameter)
        if unit.missing or unit.has_frozen or not unit.is_here:
            return
        if self._pass is not None and self._pass.is_backward:
            self._free(unit)

    def end_pass(self) -> None:
        """No further unit is needed: gather those that other ranks may have needed, and free all."""
        if self._pass is None:
            return
        current, self._pass = self._pass, None
        for unit in current.begun:
            self._free(unit)
        for unit in current.left:
            self._start(unit)
            if current.is_backward:
                self._pass_by(unit, None)
            self._free(unit)

    def end_backward(self) -> None:
        """No further gradient comes; there was none at all where a rank had no backward."""
        if self._pass is not None and self._pass.is_backward and current_backward() == NO_BACKWARD:
            self.end_pass()

    @property
    def num_bytes(self) -> int:
        """Bytes of the two largest units, as many as are whole at a time."""
        sizes = (sum(flat.unit_bytes(unit.number) for flat in unit.flats) for unit in self._units)
        return sum(sorted(sizes)[-NUM_WHOLE:])

    @property
    def are_there(self) -> bool:
        """Whether any parameter comes and goes."""
        return bool(self._units)

    @property
    def _is_sharded(self) -> bool:
        return self.are_there and not self._buffer.is_whole

    def _is_in(self, stage: int, *, is_backward: bool) -> bool:
        current = self._pass
        return current is not None and (current.stage, current.is_backward) == (stage, is_backward)

    def _begin(self, stage: int, *, is_backward: bool, is_again: bool = False) -> _Pass:
        self.end_pass()
        if not is_again:
            self._num_ahead[stage] += -1 if is_backward else 1
        order = [unit for unit in self._units if unit.stage == stage]
        if is_backward:
            order = [unit for unit in order if unit.is_read_outside or not unit.skips_backward]
            order.sort(key=lambda unit: (not unit.is_read_outside, unit.place_in_backward))
        begun = self._pass = _Pass(stage, order, is_backward=is_backward)
        if is_backward and current_backward() != NO_BACKWARD:
            call_at_end_of_backward(partial(self._end_backward, begun))
        return begun

    def _end_backward(self, begun: _Pass) -> None:
        if self._pass is begun:
            self.end_pass()

    def _need(self, unit: _Unit) -> None:
        """Wait for a unit, and let the next one of the pass travel."""
        current = self._start_up_to(unit)
        if current is None:
            return
        if current.left and self._buffer.is_updated(current.left[0].buckets):
            self._start_next(current)
        self._wait(unit)

    def _start_up_to(self, unit: _Unit) -> _Pass | None:
        """Let a unit travel, and those of the pass before it; None: it is here."""
        if unit.is_here or not self._is_sharded:
            return None
        current, is_backward = self._pass, current_backward() != NO_BACKWARD
        if current is None or not self._is_in(unit.stage, is_backward=is_backward):
            current = self._begin(unit.stage, is_backward=is_backward)
        if unit.pending is None and unit not in current.left:  # it was freed in this pass, or left out
            unit.skips_backward = False
            current = self._begin(unit.stage, is_backward=is_backward, is_again=True)
        while unit in current.left:
            self._start_next(current)
        return current

    # What comes and goes.

    def _start_next(self, current: _Pass) -> None:
        self._start(current.left[0])
        current.begun.append(current.left.pop(0))  # not before: memory may run out above

    def _start(self, unit: _Unit) -> None:
        """Send this rank's part of a unit, and get the others'."""
        for flat in unit.flats:
            flat.give_memory(unit.number)
        self._aside.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._aside):
            self._buffer.wait_for(unit.buckets)
            unit.pending = [gather for flat in unit.flats for gather in flat.start_unit(unit.number)]
        unit.missing = set(unit.parameters)

    def _wait(self, unit: _Unit) -> None:
        pending, unit.pending = unit.pending, None
        for gather in pending or ():
            gather.wait(self._clock)
        unit.is_here = True

    def _pass_by(self, now: _Unit, forward: int | None) -> None:
        """A gradient has come to an output of a unit: backward is through with those after it in forward.

        Ranks reduce their buckets now at the latest, with unused parameters or without, between the same
        gathers: a rank that waited for a reduction would not start the gather that another one waits for.
        """
        passed = []
        for index, owners in self._ends.get(now.stage, []):
            if all(u.place_in_backward < now.place_in_backward and u.is_over(forward) for u in owners):
                passed.append(index)
        self._on_passed(passed)
        for unit in self._pass.begun if self._pass is not None else ():
            if unit.place_in_backward < now.place_in_backward and unit.is_over(forward):
                self._free(unit)

    def _free(self, unit: _Unit) -> None:
        if unit.pending is not None:
            self._wait(unit)
        if unit.is_here:
            unit.is_here = False
            for flat in unit.flats:
                flat.free(unit.number)

    # When.

    def _follow(self, module: torch.nn.Module, unit: _Unit) -> None:
        """Gather a unit for its module's forward, and for what autograd does after the output's gradient."""

        def begin(called: torch.nn.Module, *arguments: Any) -> None:
            if called is not module:  # a deep copy has the same hooks
                return
            self._need(unit)
            unit.num_forwards += 1

        def end(called: torch.nn.Module, inputs: Any, output: Any) -> None:
            if called is not module:
                return
            unit.num_forwards -= 1
            self._need_in_backward(output, [unit], module_of=unit)
            is_again = current_backward() != NO_BACKWARD
            if not (is_again or unit.is_read_outside or unit.num_forwards):
                self._free(unit)

        module.register_forward_pre_hook(begin, prepend=True)
        module.register_forward_hook(end)

    def _need_in_backward(self, output: Any, units: list[_Unit], module_of: _Unit | None = None) -> None:
        """Gather units as soon as a gradient comes to an output, perhaps that of a unit's module."""

        forward, is_awaited = self._num_forwards, False

        def on_gradient(gradient: torch.Tensor) -> None:
            nonlocal is_awaited
            if is_awaited and module_of is not None:
                is_awaited = False
                if (left := module_of.awaited.pop(forward, 0) - 1) > 0:
                    module_of.awaited[forward] = left
            if torch.is_grad_enabled() and self._is_sharded:
                raise TrainingError(
                    "backward keeps a graph of itself (create_graph, as a gradient penalty), which reads "
                    "weights after they are freed, expected none: use --data-parallel-sharding gradients"
                )
            needed = [unit for unit in units if unit.is_read_outside or not unit.skips_backward]
            for unit in needed:
                self._start_up_to(unit)
            if module_of is not None and self._is_sharded:
                self._pass_by(module_of, forward)
            for unit in needed:
                self._need(unit)

        for tensor in tensors_in(output) if units and torch.is_grad_enabled() else ():
            if tensor.grad_fn is not None:
                tensor.register_hook(on_gradient)
                is_awaited = current_backward() == NO_BACKWARD
        if is_awaited and module_of is not None:
            module_of.awaited[forward] += 1

    def _follow_stage(self, stage: torch.nn.Module, number: int) -> None:
        """Let each forward of a stage be a pass."""

        def begin(called: torch.nn.Module, *arguments: Any) -> None:
            if called is not stage or current_backward() != NO_BACKWARD:
                return
            self._stage = number
            self._num_forwards += 1
            for unit in self._units:
                unit.num_forwards = 0  # an error may have ended one
            if self._is_sharded:
                self._before_forward()
                self._begin(number, is_backward=False)

        def end(called: torch.nn.Module, inputs: Any, output: Any) -> None:
            if called is not stage or current_backward() != NO_BACKWARD:
                return
            self._stage = None
            if output is not None:  # else an error ended it
                outside = [unit for unit in self._units if unit.stage == number and unit.is_read_outside]
                self._need_in_backward(output, outside)
                self.end_pass()

        stage.register_forward_pre_hook(begin, prepend=True)
        stage.register_forward_hook(end, always_call=True)


def _ends_of_buckets(
    layout: FlatLayout, modules: list[UnitModule], units: list[_Unit]
) -> dict[int, list[tuple[int, list[_Unit]]]]:
    """By stage: the index of each bucket, and the units whose modules' backward gives it gradients."""
    owners: dict[torch.nn.Parameter, list[_Unit]] = {}
    for each, unit in zip(modules, units, strict=True):
        for parameter in each.parameters:
            owners.setdefault(parameter, []).append(unit)
    found: dict[int, list[tuple[int, list[_Unit]]]] = {}
    for index, bucket_range in enumerate(layout.bucket_ranges):
        parameters = (layout.held.parameters[param.parameter] for param in bucket_range.params)
        of_bucket = list(dict.fromkeys(unit for each in parameters for unit in owners[each]))
        if all(unit.flats for unit in of_bucket):  # else their modules are not followed
            found.setdefault(bucket_range.stage, []).append((index, of_bucket))
    return found
