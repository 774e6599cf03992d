"""Hooks on the modules and parameters of a rank, which report forwards, reads and gradients to the schedule.

These reads wait for a parameter's all-gather: a module attribute (`module.weight`), `state_dict`,
`load_state_dict`, and `parameters()` within a stage's forward. A module's forward also waits for the module's
parameters, which it may hold in another way (torch.nn.LSTM). A stage's forward ends with all its parameters
gathered. Before any other read, call `finish_param_sync`; `parameters()` outside of forward is mostly called
without reading values. Outside of forward and backward the caller may also write what these reads return.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import Any
from weakref import ref

import torch

from patch.compat.torch_internals import current_backward, own_parameters, watch_reads
from patch.optimizer.buckets.buffer_group import FlatLayout
from patch.optimizer.buckets.flat_params import DetachedFlatParams, FlatParams
from patch.optimizer.buckets.grad_buffer import ParamGrad
from patch.optimizer.buckets.micro_batch import NO_BACKWARD, watch_gradients
from patch.optimizer.buckets.param_buffer import ParamBuffer
from patch.optimizer.step_schedule import StepSchedule


class ModelHooks:
    """Hooks on all modules and trained parameters of a rank's pipeline stages."""

    def __init__(
        self, layout: FlatLayout, params: ParamBuffer, grads: list[ParamGrad], schedule: StepSchedule
    ) -> None:
        self._schedule, stages, bucket_ranges = schedule, layout.held.stages, layout.bucket_ranges
        self._num_forwards = 0
        """Forwards of stages that are running."""
        self._buckets_of: dict[torch.Tensor, list[int]] = {
            grad.parameter: [bucket.index for bucket, _ in grad.parts] for grad in grads
        }
        for module in chain.from_iterable(stage.modules() for stage in stages):
            own = own_parameters(module).values()
            trained = [parameter for parameter in own if parameter in self._buckets_of]
            flats: set[FlatParams] = {params.flat_of(self._buckets_of[each][0]) for each in trained}
            flats |= {params.sharded[parameter] for parameter in own if parameter in params.sharded}
            if flats:
                detached = [flat for flat in flats if isinstance(flat, DetachedFlatParams)]
                self._watch(module, trained, detached)
        for number, stage in enumerate(stages):
            self._follow(stage, number, [index for index, r in enumerate(bucket_ranges) if r.stage == number])
        for number, grad in enumerate(grads):
            # torch hides references of post-accumulate hooks from Python's garbage collector. A strong
            # reference would keep the memory of this run when the process builds a second run.
            grad.parameter.register_post_accumulate_grad_hook(partial(_on_gradient, ref(schedule), number))

    def on_read(self, parameter: torch.nn.Parameter | None) -> None:
        """Wait for a parameter."""
        self._schedule.units.read(parameter)
        self._need((parameter,))
        self._expect_writes()

    def on_iteration(self, parameters: Iterable[torch.nn.Parameter | None]) -> None:
        """Wait for parameters within a forward; outside of it, callers may only count them."""
        self._expect_writes()
        if self._num_forwards:
            self._need(parameters)

    def _expect_writes(self) -> None:
        if not self._num_forwards and current_backward() == NO_BACKWARD:
            self._schedule.expect_writes()

    def _need(self, parameters: Iterable[torch.nn.Parameter | None]) -> None:
        if self._schedule.is_settled:
            return
        if torch.compiler.is_compiling():  # one graph break, instead of one for each bucket
            self._schedule.finish_param_sync()
            return
        known = (self._buckets_of[p] for p in parameters if p in self._buckets_of)
        self._schedule.wait_for(sorted(set(chain.from_iterable(known))))

    def _watch(
        self, module: torch.nn.Module, own: list[torch.nn.Parameter], flats: list[DetachedFlatParams]
    ) -> None:
        def wait(module: torch.nn.Module, *arguments: Any) -> None:
            self._need(own)

        def wait_for_whole(module: torch.nn.Module, *arguments: Any) -> None:
            self._need(own)
            for flat in flats:
                flat.check_whole()

        watch_reads(module, self)
        module.register_forward_pre_hook(wait, prepend=True)
        module.register_state_dict_pre_hook(wait_for_whole)
        module.register_load_state_dict_pre_hook(wait_for_whole)

    def _follow(self, stage: torch.nn.Module, number: int, buckets: list[int]) -> None:
        """Report a stage's forward, and the gradients of its outputs; at its end wait for its `buckets`."""
        schedule = self._schedule

        def begin(module: torch.nn.Module, *arguments: Any) -> None:
            self._num_forwards += 1
            if module is stage and current_backward() == NO_BACKWARD:  # a deep copy has the same hooks
                schedule.forward_begins(number)

        def end(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._num_forwards -= 1
            outer = current_backward()
            if module is stage:
                schedule.forward_ends(number, output)
            if not schedule.is_settled and output is not None:  # None: an error ended it
                schedule.wait_for(buckets)
            if module is not stage or not torch.is_grad_enabled():
                return

            def on_gradient(gradient: torch.Tensor) -> None:
                schedule.reach_stage(number, current_backward() if outer == NO_BACKWARD else outer)

            watch_gradients(output, on_gradient)

        stage.register_forward_pre_hook(begin, prepend=True)
        stage.register_forward_hook(end, always_call=True)


def _on_gradient(own: ref[StepSchedule], number: int, parameter: torch.nn.Parameter) -> None:
    schedule = own()
    if schedule is not None:
        schedule.gradient_ready(number, parameter)
