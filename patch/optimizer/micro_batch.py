"""Where a micro-batch begins, and that all ranks call the same one the last of the step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from patch.compat.torch_internals import current_backward
from patch.distributed.async_collectives import Pending, WaitClock, read_values, start_all_reduce
from patch.errors import TrainingError

NO_BACKWARD = -1
"""What `current_backward` returns outside of any backward."""


def follow_backward(
    stage: torch.nn.Module, on_forward: Callable[[], None], on_backward: Callable[[int], None]
) -> None:
    """Tell when gradients come to a stage: from whatever tensors its forward returned.

    A stage that is called inside a backward (a reentrant checkpoint recomputes it) gets its gradients from a
    backward of its own; the outer one is told, so that all parts of it are one.

    Args:
        stage: a pipeline stage, or a whole model.
        on_forward: called after a forward that autograd records.
        on_backward: called with the backward's id at the gradient of each of the output's tensors.
    """

    def after_forward(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module is not stage or not torch.is_grad_enabled():  # a deep copy has the same hook
            return
        on_forward()
        outer = current_backward()

        def on_gradient(gradient: torch.Tensor) -> None:
            on_backward(current_backward() if outer == NO_BACKWARD else outer)

        for tensor in _tensors_in(output):
            if tensor.grad_fn is not None:  # a leaf would keep its hook for all later forwards
                tensor.register_hook(on_gradient)

    stage.register_forward_hook(after_forward)


def _tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """The tensors of a module's output: in tuples, lists, mappings (as Hugging Face's) and dataclasses."""
    if isinstance(output, torch.Tensor):
        yield output
        return
    parts: Any = ()
    if isinstance(output, Mapping):
        parts = output.values()
    elif isinstance(output, (tuple, list)):
        parts = output
    elif dataclasses.is_dataclass(output):
        parts = [getattr(output, field.name) for field in dataclasses.fields(output)]
    for part in parts:
        yield from _tensors_in(part)


class LastMicroBatchCheck:
    """One micro-batch of a stage, which all data-parallel ranks must call the step's last, or none.

    ZeRO stage `gradients` reduces in every micro-batch, so ranks need equally many.

    Args:
        stage: the pipeline stage. is_last: what this rank says.
        group: data-parallel ranks. like: a tensor on the device.
    """

    def __init__(self, stage: int, is_last: bool, group: dist.ProcessGroup, like: torch.Tensor) -> None:
        self._stage, self._group = stage, group
        self._sum = torch.full((), float(is_last), dtype=torch.float32, device=like.device)
        self._pending: Pending | None = start_all_reduce(self._sum, group)

    def wait(self, clock: WaitClock) -> None:
        """Wait for the other ranks' word.

        Raises:
            TrainingError: some say that it is the step's last micro-batch, some that others follow.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        (number,) = map(int, read_values(self._sum, pending, clock))
        size = self._group.size()
        if number not in (0, size):
            raise TrainingError(
                f"a micro-batch of stage {self._stage} is the step's last on {number} of {size} ranks, "
                "expected none or all: at sharding level `gradients` data-parallel ranks need equally many "
                "micro-batches. Use --data-parallel-sharding optimizer, which takes any number"
            )
