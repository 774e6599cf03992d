"""What torch has no public name for.

Reads of parameters, which backward runs and when it ends, norms of many tensors.

- torch/nn/modules/module.py:1954-1966, 2715: attribute access and `parameters()` read a module's dict
  `_parameters`; a dict that tells of it is met by eager code, functional_call and torch.compile, which traces
  into it. (DeepSpeed's ZeRO-3 has one: ZeROOrderedDict in deepspeed/runtime/zero/parameter_offload.py.)
  Delete when torch has a hook for reads.
- torch/utils/checkpoint.py:1170 asks for the id of the running backward by a private name, which tells a
  backward inside a backward (reentrant checkpoints) from the outer one. Delete when it has a public one.
- torch/nn/utils/clip_grad.py:95 takes the norms of many tensors in one call by a private name; the public
  `get_total_norm` has no argument for the type of the sums. Delete when it has.
- torch/distributed/fsdp/_runtime_utils.py is called at the end of a backward by a private name. Delete when
  there is a public one.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, ValuesView
from typing import Any, Protocol

import torch


class Reader(Protocol):
    """Who is told of reads, before they happen."""

    def on_read(self, parameter: torch.nn.Parameter | None) -> None:
        """Somebody gets a parameter by its name."""

    def on_iteration(self, parameters: Iterable[torch.nn.Parameter | None]) -> None:
        """Somebody gets all parameters of a module; perhaps only to count them."""


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward that runs in this thread; -1: none."""
foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm
"""(tensors, order, dtype=) -> the norm of each tensor, summed in `dtype`."""


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that runs in this thread has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _Parameters(dict[str, torch.nn.Parameter | None]):
    """A module's parameters."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter | None], reader: Reader) -> None:
        super().__init__(parameters)
        self._reader = reader

    def __getitem__(self, name: str) -> torch.nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._reader.on_read(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def items(self) -> ItemsView[str, torch.nn.Parameter | None]:  # type: ignore[override]
        self._reader.on_iteration(super().values())
        return super().items()

    def values(self) -> ValuesView[torch.nn.Parameter | None]:  # type: ignore[override]
        self._reader.on_iteration(super().values())
        return super().values()

    def __reduce__(self) -> tuple:
        """Copies are plain: they have parameters of their own."""
        return dict, ({name: self[name] for name in self},)


def watch_reads(module: torch.nn.Module, reader: Reader) -> None:
    """Tell `reader` before somebody gets parameters that `module` itself owns.

    Scripted modules, which have no such dict, are left alone.
    """
    if type(module._parameters) is dict:
        module.__dict__["_parameters"] = _Parameters(module._parameters, reader)


def is_watched(module: torch.nn.Module) -> bool:
    """Whether somebody has called `watch_reads`."""
    return isinstance(module._parameters, _Parameters)


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that `module` itself owns, by name, without telling anybody."""
    found = module._parameters
    items = dict.items(found) if isinstance(found, dict) else found.items()
    return {name: parameter for name, parameter in items if parameter is not None}
