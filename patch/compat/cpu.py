"""Lets megatron-core 0.16.1 run on a machine without CUDA.

A CPU run uses code of megatron-core that gets the current device from `torch.cuda` or writes `device="cuda"`.
A patch of torch.cuda itself would affect transformers and all other libraries. So only the *name* `torch` in
the listed modules is replaced by a stand-in that returns the CPU.

Never applied in a process with CUDA. Delete an entry when megatron-core uses the device of its inputs there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe import token_dispatcher

# Module of megatron-core -> reason (line numbers of 0.16.1).
MODULES = {
    "megatron.core.tensor_parallel.mappings": "torch.cuda.current_device() at 91-181, 442",
    "megatron.core.tensor_parallel.layers": "torch.cuda.current_device() at 261, 552, 597-607, 873-899",
    "megatron.core.tensor_parallel.utils": "torch.cuda.current_device() at 70, 91",
    "megatron.core.tensor_parallel.random": "torch.cuda.manual_seed, get_rng_state at 235-238, 422",
    "megatron.core.utils": "torch.cuda.current_device() in GlobalMemoryBuffer.get_tensor at 631",
    "megatron.core.pipeline_parallel.p2p_communication": "current_device at 190-321, synchronize at 242, 398",
    "megatron.core.pipeline_parallel.schedules": 'device="cuda" at 596, 983, 2138',
    "megatron.core.models.common.embeddings.rotary_pos_embedding": (
        "current_device at 78, 162: of upstream's own model; ours has other angles"
    ),
    "megatron.core.transformer.moe.router": "torch.cuda.current_device() at 90-92, 169-198",
    "megatron.core.transformer.moe.token_dispatcher": "torch.cuda.Stream() at 445, which is used at 871-898",
}

_CPU = torch.device("cpu")


class StreamOnCpu(nullcontext):
    """A stand-in for a stream and an event; queued work is already done."""

    def wait_stream(self, other: StreamOnCpu) -> None:
        """Do nothing."""

    def record_event(self) -> StreamOnCpu:
        """Return an event to wait for."""
        return self

    def synchronize(self) -> None:
        """Do nothing."""


class CudaOnCpu:
    """A stand-in for torch.cuda: functions that megatron-core calls work on the CPU."""

    manual_seed = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda *unused, **named: torch.get_rng_state())
    Stream = current_stream = StreamOnCpu

    def stream(self, stream: StreamOnCpu) -> StreamOnCpu:
        """Return a context that changes nothing."""
        return stream

    def current_device(self) -> torch.device:
        """Return the CPU."""
        return _CPU

    def synchronize(self, *unused: Any) -> None:
        """Do nothing: CPU operations are synchronous."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class TorchOnCpu:
    """A stand-in for the name `torch` in a module of megatron-core: `device="cuda"` becomes the CPU."""

    cuda = CudaOnCpu()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap a factory function of torch: `device="cuda"` becomes the CPU."""

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


for _name in ("tensor", "zeros", "ones", "empty"):
    setattr(TorchOnCpu, _name, staticmethod(_on_cpu(getattr(torch, _name))))


def replace_torch(module_name: str) -> None:
    """Replace `torch` in one module of megatron-core by the stand-in."""
    vars(importlib.import_module(module_name))["torch"] = TorchOnCpu()


def _move_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def apply() -> None:
    """Replace `torch` in MODULES, and the state of the CUDA generator by the state of the CPU generator.

    tensor_parallel/random.py:40-106 reads that state from torch.cuda.default_generators, for the RNG tracker
    (sequence parallelism) and for activation recomputation.

    In torch 2.13 the token counts of an all-to-all between experts must not be tensors; moe_utils.py:1093
    converts only tensors on a GPU to numbers. (GPTModel imports the modules of experts anyway.)
    """
    for module_name in MODULES:
        replace_torch(module_name)
    vars(token_dispatcher).update(maybe_move_tensor_to_cpu=_move_to_cpu)
    vars(random).update(
        _get_cuda_rng_state=CudaOnCpu.get_rng_state,
        _set_cuda_rng_state=lambda state, **unused: torch.set_rng_state(state),
    )


def is_applied() -> bool:
    """Return whether upstream's modules have the stand-in."""
    return isinstance(vars(random)["torch"], TorchOnCpu)
