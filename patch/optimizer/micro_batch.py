"""Micro-batches of pipeline stages: where each begins and ends, and that all ranks call the same one last.

A micro-batch of a pipeline stage begins with the first gradient that comes to the stage in a backward: at any
tensor that its forward returned, or at a parameter that somebody used beside the forward. It ends where the
next backward begins, or the reductions of the step. So ranks whose unused parameters differ still agree. A
backward may pass several stages of a rank (an interleaved pipeline): it is one micro-batch of each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from patch.compat.torch_internals import call_at_end_of_backward, current_backward
from patch.distributed.async_collectives import WaitClock, read_values, start_all_reduce
from patch.errors import TrainingError

NO_BACKWARD = -1
"""The value of `current_backward` outside of any backward."""


class MicroBatches:
    """The micro-batches of a rank's stages in one step.

    Args:
        stages: the pipeline stages of this rank.
        on_begin: called with the stage, and whether it is its last micro-batch, before the first gradient.
        on_end: called with the stages to which an open backward had come, when no further gradient comes.
    """

    def __init__(
        self,
        stages: Sequence[torch.nn.Module],
        on_begin: Callable[[int, bool], None],
        on_end: Callable[[Set[int]], None],
    ) -> None:
        self._on_begin, self._on_end = on_begin, on_end
        self.is_accumulating = False
        """Whether one that begins is followed by others on its stage (see `no_sync`)."""
        self._forwarded: set[int] = set()
        """Stages with a forward since the last step."""
        self.reset()
        for number, stage in enumerate(stages):
            _follow_backward(stage, partial(self._forwarded.add, number), partial(self._come_to, number))

    def reset(self) -> None:
        """Begin a step; forget a backward that an error ended."""
        self.ended: set[int] = set()
        """Stages whose last micro-batch of this step has begun."""
        self._backward, self._open = NO_BACKWARD, set[int]()
        """The backward that is open, and the stages that it has come to."""
        self._is_over = False
        """Whether that backward is known to have ended."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of the micro-batches before the last one: their gradients are added up."""
        return _NoSync(self)

    @property
    def is_nested(self) -> bool:
        """Whether a gradient that comes now is of a backward inside the open one."""
        return current_backward() != self._backward

    def note_gradient(self, stage: int) -> None:
        """A gradient of one of a stage's parameters comes now."""
        if (self._is_over or stage not in self._open) and stage in self._forwarded:
            self._come_to(stage, current_backward())  # used beside the forward

    def _come_to(self, stage: int, backward: int) -> None:
        """A gradient has come to a stage: the first one in a backward begins the stage's micro-batch."""
        if backward == self._backward and stage in self._open:
            return
        if stage in self.ended:
            raise TrainingError(
                f"a backward of stage {stage} began after the step's last, expected one micro-batch outside "
                "`no_sync`, the last: put the others, `torch.autograd.grad` through the model, and all but "
                "the last backward of a retained graph, inside `with optimizer.no_sync()`; between steps "
                "call `zero_grad`; a reentrant checkpoint outside of the forward is a backward of its own: "
                "use_reentrant=False"
            )
        if backward != self._backward:
            self.end()
            if backward == current_backward():  # else an outer one, which is not known to end with this one
                call_at_end_of_backward(partial(self._note_end, backward))
        self._backward = backward
        self.begin(stage, is_last=not self.is_accumulating)

    def _note_end(self, backward: int) -> None:
        self._is_over |= backward == self._backward

    def begin(self, stage: int, *, is_last: bool) -> None:
        """Begin a micro-batch of a stage."""
        self._on_begin(stage, is_last)
        self._open.add(stage)
        if is_last:
            self.ended.add(stage)

    def end(self) -> None:
        """No further gradient comes from the open backward."""
        stages = self._open
        self._backward, self._open, self._is_over = NO_BACKWARD, set(), False
        self._on_end(stages)

    def end_all(self, stages: Iterable[int]) -> None:
        """End the step: each of these stages has had its last micro-batch then."""
        self.end()
        for stage in stages:
            if stage not in self.ended:  # it had no gradient on this rank
                self.begin(stage, is_last=True)
                self.end()

    def forget_forwards(self) -> None:
        """The step's gradients are summed: a gradient from here on needs another forward."""
        self._forwarded.clear()


class _NoSync(AbstractContextManager[None]):
    """The context of `no_sync`.

    A class, because schedules that only run forward never leave it: a generator would end by itself when it
    is collected, perhaps in the midst of a later step.
    """

    def __init__(self, micro_batches: MicroBatches) -> None:
        self._micro_batches = micro_batches

    def __enter__(self) -> None:
        self._micro_batches.is_accumulating = True

    def __exit__(self, *error: object) -> None:
        self._micro_batches.is_accumulating = False


def _follow_backward(
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

        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:  # a leaf would keep its hook for all later forwards
                tensor.register_hook(on_gradient)

    stage.register_forward_hook(after_forward)


def tensors_in(output: Any) -> Iterator[torch.Tensor]:
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
        yield from tensors_in(part)


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
        self._pending = start_all_reduce(self._sum, group) if group.size() > 1 else None

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
