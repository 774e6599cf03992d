"""Lets megatron-core 0.16.1 run on a machine without CUDA.

Upstream asks `torch.cuda` for the current device and writes `device="cuda"` in places that a CPU run
passes through. Patching torch.cuda itself would be seen by transformers and everybody else, so only
the *name* `torch` inside the listed upstream modules is replaced, by a stand-in that answers "cpu".

Never applied where CUDA is there. Delete an entry when upstream asks for the device of its inputs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import random

# Upstream module -> why (line numbers of 0.16.1).
MODULES = {
    "megatron.core.tensor_parallel.mappings": "torch.cuda.current_device() at 91-181, 442",
    "megatron.core.tensor_parallel.layers": "torch.cuda.current_device() at 261, 552, 597-607, 873-899",
    "megatron.core.tensor_parallel.utils": "torch.cuda.current_device() at 70, 91",
    "megatron.core.tensor_parallel.random": "torch.cuda.manual_seed, get_rng_state at 235-238, 422",
    "megatron.core.utils": "torch.cuda.current_device() in GlobalMemoryBuffer.get_tensor at 631",
    "megatron.core.pipeline_parallel.p2p_communication": "current_device at 190-321, synchronize at 242, 398",
    "megatron.core.pipeline_parallel.schedules": 'device="cuda" at 596, 983, 2138',
    "megatron.core.models.common.embeddings.rotary_pos_embedding": "current_device at 78, 162",
}

_CPU = torch.device("cpu")


class CudaOnCpu:
    """What upstream asks of torch.cuda, answered for the CPU; anything else is torch.cuda's own."""

    manual_seed = staticmethod(torch.manual_seed)
    get_rng_state = staticmethod(lambda *unused: torch.get_rng_state())

    def current_device(self) -> torch.device:
        """The CPU."""
        return _CPU

    def synchronize(self, *unused: Any) -> None:
        """Nothing to wait for: CPU operations are synchronous."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class TorchOnCpu:
    """Stands in for the name `torch` in an upstream module: `device="cuda"` becomes the CPU."""

    cuda = CudaOnCpu()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return create


for _name in ("tensor", "zeros", "ones", "empty"):
    setattr(TorchOnCpu, _name, staticmethod(_on_cpu(getattr(torch, _name))))


def replace_torch(module_name: str) -> None:
    """Give one upstream module the stand-in instead of torch."""
    vars(importlib.import_module(module_name))["torch"] = TorchOnCpu()


def _get_rng_state(device: Any = None, clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def apply() -> None:
    """Replace `torch` in MODULES and the CUDA generator's state by the CPU generator's.

    The latter: tensor_parallel/random.py:40-106 reads torch.cuda.default_generators, which the RNG
    tracker (sequence parallelism) and activation recomputation need.
    """
    for module_name in MODULES:
        replace_torch(module_name)
    vars(random).update(_get_cuda_rng_state=_get_rng_state, _set_cuda_rng_state=_set_rng_state)


def is_applied() -> bool:
    """Whether upstream's modules have the stand-in."""
    return isinstance(vars(random)["torch"], TorchOnCpu)
