"""Schedule for gathering and freeing weights (ZeRO stage `parameters`).

A unit is the parameters of one module, usually a layer, which are gathered and freed together.

    forward   gathered from the start of the module's forward to its end
    backward  gathered from the gradient of the module's output, freed when all its gradients are collected;
              with recomputation of the module, gathered from the start of the recomputation

The all-gather of a unit overlaps with the compute of the previous unit.

Each forward and each backward of a stage is a pass. In each pass ranks gather all units of a stage in the
same order. A rank that needs a unit first gathers the units before it, and the end of a pass gathers the
rest. So all ranks run the same collectives, even if some ranks skip a module. If a freed unit is needed
again, it is gathered in another pass, on all ranks or on none.

Some weights are read outside of their module (a tied embedding, or a head whose loss reads it). They stay
gathered until the end of the stage's forward, and from the start of its backward.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import VocabParallelEmbedding

from patch.compat.torch_internals import call_at_end_of_backward, current_backward
from patch.device import stream_of, streams_of
from patch.distributed.async_collectives import CommHandle, WaitClock
from patch.errors import TrainingError
from patch.optimizer.buckets.buffer_group import FlatLayout
from patch.optimizer.buckets.micro_batch import NO_BACKWARD, watch_gradients
from patch.optimizer.buckets.param_buffer import ParamBuffer
from patch.optimizer.trainable_params import UnitModule, unit_modules
from patch.optimizer.zero3.sharded_params import Zero3FlatParams

if TYPE_CHECKING:
    from patch.optimizer.step_schedule import StepSchedule


class _FsdpUnit:
    def __init__(self, number: int, of: UnitModule) -> None:
        self.number, self.module, self.parameters = number, of.module, of.parameters
        self.stage, self.place_in_backward = of.stage, of.place_in_backward
        self.buckets: list[int] = []
        self.flats: list[Zero3FlatParams] = []
        self.trained: set[torch.nn.Parameter] = set()
        self.pending: list[CommHandle] | None = None
        self.is_gathered = False
        self.has_frozen = False
        """Whether some parameters are frozen, so that gradients do not show the end of backward."""
        self.has_submodules = of.has_submodules
        """Whether its module contains other modules with parameters."""
        self.skips_backward = type(of.module) in (torch.nn.Embedding, VocabParallelEmbedding)
        """Whether backward needs no values, as for an embedding."""
        self.num_forwards = 0
        self.is_read_outside = False
        """Whether a parameter was ever read outside of the module's forward."""
        self.missing: set[torch.nn.Parameter] = set()
        """Trained parameters without a gradient since they were gathered."""
        self.awaited: Counter[int] = Counter()
        """Outputs of the module that await a gradient, by the number of the stage's forward."""

    def is_over(self, forward: int | None) -> bool:
        """Return whether backward no longer needs the unit.

        Backward has reached an output of forward number `forward`, or has ended (None).

        Graphs of later forwards belong to other micro-batches; earlier ones may belong to the same.
        """
        return (
            forward is None
            or not (self.has_submodules or self.is_read_outside)
            and all(number > forward for number in self.awaited)
        )


class _Pass:
    def __init__(self, stage: int, order: list[_FsdpUnit], *, is_backward: bool) -> None:
        self.stage, self.is_backward = stage, is_backward
        self.left = order
        """Units that are not gathered yet, in order."""
        self.begun: list[_FsdpUnit] = []


class Zero3Scheduler:
    """The units of a rank's pipeline stages.

    Args:
        schedule: closes buckets to which backward brings no further gradient, and waits for updates.
    """

    def __init__(
        self, layout: FlatLayout, params: ParamBuffer, schedule: StepSchedule, clock: WaitClock
    ) -> None:
        self._params, self._schedule, self._clock, device = params, schedule, clock, layout.held.device
        units = [_FsdpUnit(number, each) for number, each in enumerate(unit_modules(layout.held.stages), 1)]
        self._unit_of: dict[torch.Tensor, _FsdpUnit] = {}
        for flat in params.sharded_flats:
            for number in flat.units:
                unit = units[number - 1]
                unit.flats.append(flat)
                for parameter in flat.parameters_of(number):
                    self._unit_of[parameter] = unit
                    unit.trained |= {parameter} if parameter.requires_grad else set()
                    unit.has_frozen |= not parameter.requires_grad
        for index, bucket_range in enumerate(layout.bucket_ranges):
            if bucket_range.unit and params.flat_of(index) in params.sharded_flats:
                units[bucket_range.unit - 1].buckets.append(index)
        self._units = [unit for unit in units if unit.flats]
        self._pass: _Pass | None = None
        self._stage: int | None = None
        """The stage whose forward is running, or None, also in a backward."""
        self._num_forwards = 0
        """Number of forwards of all stages so far."""
        self._num_ahead: Counter[int] = Counter()
        """Forwards of the step without a backward so far, by stage."""
        if not self._units:
            return
        self._streams, self._aside = streams_of(device), stream_of(device, "gathers")
        self._ends = _ends_of_buckets(layout, units)
        for unit in self._units:
            self._follow(unit)

    def read(self, parameter: torch.nn.Parameter | None) -> None:
        """Gather the unit of a parameter that is read by name.

        Raises:
            TrainingError: the parameter is freed outside of forward and backward: one rank cannot gather it.
        """
        unit = self._unit_of.get(parameter) if parameter is not None else None
        if unit is None or unit.num_forwards or self._params.is_whole:
            return
        if self._stage is None and current_backward() == NO_BACKWARD:
            self._params.check_whole()
            return
        unit.is_read_outside |= self._stage is not None
        self._need(unit)

    def begin_forward(self, stage: int) -> None:
        """Begin a stage's forward pass."""
        self._stage = stage
        self._num_forwards += 1
        for unit in self._units:
            unit.num_forwards = 0  # an error may have ended a forward
        if self.is_sharded:
            self._begin(stage, is_backward=False)

    def end_forward(self, stage: int, output: Any) -> None:
        """End a stage's forward pass; an error ended it if `output` is None."""
        self._stage = None
        if output is not None:
            outside = [unit for unit in self._units if unit.stage == stage and unit.is_read_outside]
            self._need_in_backward(output, outside)
            self.end_pass()

    def begin_backward(self, stage: int) -> None:
        """Begin a stage's backward pass; if this rank ran no forward, first a forward pass."""
        if not self.is_sharded or self._is_in(stage, is_backward=True):
            return
        if current_backward() == NO_BACKWARD and self._num_ahead[stage] < 1:
            self._begin(stage, is_backward=False)
        self._begin(stage, is_backward=True)

    def begin_step(self) -> None:
        """Forget earlier forwards, which are not part of the new step."""
        self.end_pass()
        self._num_ahead.clear()
        for unit in self._units:
            unit.awaited.clear()

    def collected(self, parameter: torch.nn.Parameter) -> None:
        """Record that the gradient of a parameter has been collected."""
        unit = self._unit_of.get(parameter)
        if unit is None:
            return
        unit.missing.discard(parameter)
        if unit.missing or unit.has_frozen or not unit.is_gathered:
            return
        if self._pass is not None and self._pass.is_backward:
            self._free(unit)

    def end_pass(self) -> None:
        """End the pass: gather units that other ranks may have needed, and free all units."""
        if self._pass is None:
            return
        current, self._pass = self._pass, None
        for unit in current.begun:
            self._free(unit)
        for unit in current.left:
            self._start(unit)
            if current.is_backward:
                self._release_finished_units(unit, None)
            self._free(unit)

    def end_backward(self) -> None:
        """End the backward pass: no further gradient comes, perhaps because this rank had no backward."""
        if self._pass is not None and self._pass.is_backward and current_backward() == NO_BACKWARD:
            self.end_pass()

    @property
    def is_sharded(self) -> bool:
        """Return whether parameters are gathered and freed now."""
        return bool(self._units) and not self._params.is_whole

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

    def _need(self, unit: _FsdpUnit) -> None:
        """Wait for a unit, and start the gather of the next unit of the pass."""
        current = self._start_up_to(unit)
        if current is None:
            return
        if current.left and self._schedule.is_updated(current.left[0].buckets):
            self._start_next(current)
        self._wait(unit)

    def _start_up_to(self, unit: _FsdpUnit) -> _Pass | None:
        """Start the gathers up to a unit; return None if the unit is gathered already."""
        if unit.is_gathered or not self.is_sharded:
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

    def _start_next(self, current: _Pass) -> None:
        self._start(current.left[0])
        current.begun.append(current.left.pop(0))  # not earlier: memory may run out above

    def _start(self, unit: _FsdpUnit) -> None:
        for flat in unit.flats:
            flat.give_memory(unit.number)
        self._aside.wait_stream(self._streams.current_stream())
        with self._streams.stream(self._aside):
            self._schedule.wait_for(unit.buckets)
            unit.pending = [gather for flat in unit.flats for gather in flat.start_unit(unit.number)]
        unit.missing = set(unit.trained)

    def _wait(self, unit: _FsdpUnit) -> None:
        pending, unit.pending = unit.pending, None
        for gather in pending or ():
            gather.wait(self._clock)
        unit.is_gathered = True

    def _release_finished_units(self, now: _FsdpUnit, forward: int | None) -> None:
        """Backward has reached `now`: close the buckets of finished units that ran after it, and free them.

        Their buckets are reduced now at the latest, so that all ranks start reductions and gathers in one
        order. Otherwise one rank could wait for a reduction, and another rank for a gather.
        """
        passed = []
        for index, owners in self._ends.get(now.stage, []):
            if all(u.place_in_backward < now.place_in_backward and u.is_over(forward) for u in owners):
                passed.append(index)
        self._schedule.close(passed)
        for unit in self._pass.begun if self._pass is not None else ():
            if unit.place_in_backward < now.place_in_backward and unit.is_over(forward):
                self._free(unit)

    def _free(self, unit: _FsdpUnit) -> None:
        if unit.pending is not None:
            self._wait(unit)
        if unit.is_gathered:
            unit.is_gathered = False
            for flat in unit.flats:
                flat.free(unit.number)

    def _follow(self, unit: _FsdpUnit) -> None:
        """Gather a unit for its module's forward, and when its output gets a gradient in backward."""
        module = unit.module

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

    def _need_in_backward(
        self, output: Any, units: list[_FsdpUnit], module_of: _FsdpUnit | None = None
    ) -> None:
        """Gather units when an output, made by the module of `module_of`, gets a gradient."""

        forward, is_awaited = self._num_forwards, False

        def on_gradient(gradient: torch.Tensor) -> None:
            nonlocal is_awaited
            if is_awaited and module_of is not None:
                is_awaited = False
                if (left := module_of.awaited.pop(forward, 0) - 1) > 0:
                    module_of.awaited[forward] = left
            if torch.is_grad_enabled() and self.is_sharded:
                raise TrainingError(
                    "got create_graph=True (for example a gradient penalty), expected False: its graph reads "
                    "freed weights. Use --data-parallel-sharding gradients"
                )
            needed = [unit for unit in units if unit.is_read_outside or not unit.skips_backward]
            for unit in needed:
                self._start_up_to(unit)
            if module_of is not None and self.is_sharded:
                self._release_finished_units(module_of, forward)
            for unit in needed:
                self._need(unit)

        if units and torch.is_grad_enabled() and watch_gradients(output, on_gradient):
            is_awaited = current_backward() == NO_BACKWARD
            if is_awaited and module_of is not None:
                module_of.awaited[forward] += 1


def _ends_of_buckets(
    layout: FlatLayout, units: list[_FsdpUnit]
) -> dict[int, list[tuple[int, list[_FsdpUnit]]]]:
    """Return for each stage the index of each bucket, and the units whose backward gives it gradients."""
    owners: dict[torch.nn.Parameter, list[_FsdpUnit]] = {}
    for unit in units:
        for parameter in unit.parameters:
            owners.setdefault(parameter, []).append(unit)
    found: dict[int, list[tuple[int, list[_FsdpUnit]]]] = {}
    for index, bucket_range in enumerate(layout.bucket_ranges):
        parameters = (layout.held.parameters[param.parameter] for param in bucket_range.params)
        of_bucket = list(dict.fromkeys(unit for each in parameters for unit in owners[each]))
        if all(unit.flats for unit in of_bucket):  # the modules of other units are not followed
            found.setdefault(bucket_range.stage, []).append((index, of_bucket))
    return found
