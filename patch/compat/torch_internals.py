"""Functions of torch that have no public name; delete each entry when torch has a public way.

They observe reads of parameters and operators, identify the running backward, call back at its end, and
compute norms of many tensors. They also tell whether an operator has a kernel, and name regions of a profile.

- torch/nn/modules/module.py:1954-1966, 2715: attribute access and `parameters()` read the dict `_parameters`
  of a module. A dict that reports reads works in eager code, in functional_call and in torch.compile, which
  traces into it. (DeepSpeed's ZeRO-3 has such a dict too: ZeROOrderedDict in
  deepspeed/runtime/zero/parameter_offload.py.)
- torch/utils/checkpoint.py:1170 gets the id of the running backward from a private function. The id
  distinguishes a backward inside a backward (reentrant checkpoints) from the outer backward.
- torch/nn/utils/clip_grad.py:95 computes the norms of many tensors with a private function; the public
  `get_total_norm` has no argument for the dtype of the sums.
- torch/distributed/distributed_c10d.py gives the store of the job with a private function.
- torch/distributed/fsdp/_runtime_utils.py registers a callback for the end of backward privately.
- torch/utils/_python_dispatch.py has the mode that sees every operator, also in backward; the public
  TorchFunctionMode does not see backward.
- torch/_ops.py:894 asks with a private function which kernels an operator has.
- torch/autograd/profiler.py:84 has a private flag for a running profiler. Without a profiler,
  `record_function` costs some microseconds, and a step would have hundreds of calls.
- torch/optim/_muon.py:24 has the Newton-Schulz iteration of torch.optim.Muon as a private function.
- torch/profiler/profiler.py takes a private class for the option to record threads that were started before
  the profiler, such as the thread that updates offloaded states.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Sequence, ValuesView
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd import profiler
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class Reader(Protocol):
    """A callback for reads of parameters."""

    def on_read(self, parameter: torch.nn.Parameter | None) -> None:
        """Handle the coming read of a parameter by its name."""

    def on_iteration(self, parameters: Iterable[torch.nn.Parameter | None]) -> None:
        """Handle the coming read of all parameters of a module, perhaps only to count them."""


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The id of the backward that runs in this thread, or -1 if none runs."""
foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm
"""foreach_norm(tensors, order, dtype=): the norm of each tensor, summed in `dtype`."""
newton_schulz: Callable[[torch.Tensor, tuple[float, float, float], int, float], torch.Tensor] = (
    _zeropower_via_newtonschulz
)
"""newton_schulz(matrix, coefficients, steps, eps): the orthogonalized matrix, computed in bf16."""
has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key
"""has_kernel(operator, dispatch key): whether torch was built with it."""


def connect_to_job_store() -> dist.Store:
    """Return a new connection to the job's rendezvous store: one for each thread."""
    store: Any = _get_default_store()  # torch has no annotation of `clone`
    return store.clone()


def call_at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that runs in this thread has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


class _Parameters(dict[str, torch.nn.Parameter | None]):
    """A module's parameter dict, which calls a Reader before each read."""

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
        """Copies are plain dicts, because a copied module has other parameters."""
        return dict, ({name: self[name] for name in self},)


def watch_reads(module: torch.nn.Module, reader: Reader) -> None:
    """Call `reader` before each read of a parameter that `module` itself owns.
    Scripted modules have no such dict and are not changed.
    """
    if type(module._parameters) is dict:
        module.__dict__["_parameters"] = _Parameters(module._parameters, reader)


def is_watched(module: torch.nn.Module) -> bool:
    """Return whether `watch_reads` was called for the module."""
    return isinstance(module._parameters, _Parameters)


def own_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that `module` itself owns, by name, without a call of its Reader."""
    parameters = module._parameters
    items = dict.items(parameters) if isinstance(parameters, dict) else parameters.items()
    return {name: parameter for name, parameter in items if parameter is not None}


# Named regions of a profile, which cost nothing without a profiler.

_NOTHING = nullcontext()


def region(name: str, *values: object) -> AbstractContextManager[object]:
    """Return a context that records its time under this name if a profiler runs.

    Args:
        name: the name, with a `%` for each value.
    """
    return record_function(name % values) if profiler._is_profiler_enabled else _NOTHING


class Phases:
    """Consecutive profile regions: each region ends where the next region begins."""

    def __init__(self) -> None:
        self._current: record_function | None = None

    def begin(self, name: str) -> None:
        """End the open region, and open the next region if a profiler runs."""
        self.end()
        if profiler._is_profiler_enabled:
            self._current = record_function(name)
            self._current.__enter__()

    def end(self) -> None:
        """End the open region."""
        if self._current is not None:
            self._current.__exit__(None, None, None)
            self._current = None


def step_profiler(*, is_cuda: bool) -> profile:
    """Return a profiler of all threads of this process, and of its GPU."""
    activities: Sequence[ProfilerActivity] = [ProfilerActivity.CPU]
    if is_cuda:
        activities = [*activities, ProfilerActivity.CUDA]
    options = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return profile(activities=activities, acc_events=True, experimental_config=options)
