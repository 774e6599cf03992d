"""Micro-batches of a step: the context for all but the last, and a check that ranks agree on the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from patch.distributed.async_collectives import WaitClock, read_values, start_all_reduce
from patch.errors import TrainingError

NO_BACKWARD = -1
"""The value of `current_backward` outside of any backward."""


class NoSync(AbstractContextManager[None]):
    """The context of `no_sync`.

    A generator would not do: forward-only schedules never leave the context, and a collected generator would
    end it, perhaps in the middle of a later step.
    """

    is_open = False

    def __enter__(self) -> None:
        self.is_open = True

    def __exit__(self, *error: object) -> None:
        self.is_open = False


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a module's output: in tuples, lists, mappings (Hugging Face) and dataclasses."""
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
        yield from tensors_in(part)


def watch_gradients(output: Any, on_gradient: Callable[[torch.Tensor], None]) -> bool:
    """Call `on_gradient` with the gradient of each tensor of an output; return whether any has one."""
    # A leaf would keep its hook for all later forwards.
    watched = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
    for tensor in watched:
        tensor.register_hook(on_gradient)
    return bool(watched)


class LastMicroBatchCheck:
    """A check that all data-parallel ranks, or none, call a micro-batch of a stage the step's last.

    ZeRO stage `gradients` reduces every micro-batch, so ranks need the same number of them.
    """

    def __init__(self, stage: int, is_last: bool, group: dist.ProcessGroup, device: torch.device) -> None:
        self._stage, self._group = stage, group
        self._sum = torch.full((), float(is_last), dtype=torch.float32, device=device)
        self._pending = start_all_reduce(self._sum, group) if group.size() > 1 else None

    def wait(self, clock: WaitClock) -> None:
        """Wait for all ranks; raise TrainingError if only some call it the step's last micro-batch."""
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
