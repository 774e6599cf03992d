"""Whoever reads a parameter that is on its way waits for it.

That is whoever first gets one of a bucket's parameters from a module by name (`module.weight`), `state_dict`
or `load_state_dict`, within a stage's forward also `parameters()`; or, before anything else of its forward,
the module that owns it, which may hold it in another way (torch.nn.LSTM). A stage's forward ends with all its
parameters in place. Whoever got a parameter in another way (`parameters()` outside forward, which many call
without reading) calls `finish_param_sync` first.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

import torch

from patch.compat.torch_internals import own_parameters, watch_reads
from patch.optimizer.domain import FlatLayout
from patch.optimizer.param_buffer import ParamBuffer
from patch.optimizer.param_units import ParamUnits


class ParamReads:
    """The reads of all modules of a rank's pipeline stages.

    Args:
        layout: of the parameters.
        buffer: knows which buckets are on their way.
        units: gathers what is freed; None: nothing is.
    """

    def __init__(self, layout: FlatLayout, buffer: ParamBuffer, units: ParamUnits | None) -> None:
        self._units = units
        self._buffer, trained, bucket_ranges = buffer, layout.trained, layout.bucket_ranges
        self._num_forwards = 0
        """Forwards of stages, under way."""
        self._buckets_of: dict[torch.Tensor, list[int]] = {}
        """Buckets that hold a parameter, or parts of it."""
        for index, bucket_range in enumerate(bucket_ranges):
            for param in bucket_range.params:
                self._buckets_of.setdefault(trained.parameters[param.parameter], []).append(index)
        for module in chain.from_iterable(stage.modules() for stage in trained.stages):
            own = [p for p in own_parameters(module).values() if p in self._buckets_of]
            if own:
                self._watch(module, own)
        for number, stage in enumerate(trained.stages):
            self._follow(stage, [index for index, r in enumerate(bucket_ranges) if r.stage == number])

    def on_read(self, parameter: torch.nn.Parameter | None) -> None:
        """Wait for a parameter."""
        if self._units is not None:
            self._units.read((parameter,))
        self._need((parameter,))

    def on_iteration(self, parameters: Iterable[torch.nn.Parameter | None]) -> None:
        """Wait for parameters within a forward; outside they may only be counted."""
        if self._num_forwards:
            self._need(parameters)

    def _need(self, parameters: Iterable[torch.nn.Parameter | None]) -> None:
        if self._buffer.is_settled:
            return
        if torch.compiler.is_compiling():  # traced: one break of the graph, not one for each bucket
            self._buffer.finish_param_sync()
            return
        known = (self._buckets_of[p] for p in parameters if p in self._buckets_of)
        self._buffer.wait_for(sorted(set(chain.from_iterable(known))))

    def _watch(self, module: torch.nn.Module, own: list[torch.nn.Parameter]) -> None:
        """Be asked before a module's own parameters are read."""
        flats = {self._buffer.flat_of(self._buckets_of[parameter][0]) for parameter in own}

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

    def _follow(self, stage: torch.nn.Module, needed: list[int]) -> None:
        """Know when a stage's forward is under way, and let it end with its parameters (buckets `needed`)."""

        def begin(module: torch.nn.Module, *arguments: Any) -> None:
            self._num_forwards += 1

        def end(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self._num_forwards -= 1
            if not self._buffer.is_settled and output is not None:  # else an error ended it
                self._buffer.wait_for(needed)

        stage.register_forward_pre_hook(begin, prepend=True)
        stage.register_forward_hook(end, always_call=True)
