"""What registering memory with NCCL needs of torch and has no public name.

- torch/distributed/distributed_c10d.py gives the backend of a group, which registers memory pools, with a
  private function. Delete when there is a public one.
- torch/cuda/memory.py:1156 (2.11) changes the allocator's settings with a private function. A pool with an
  allocator of its own cannot have segments that grow (megatron-core refuses them:
  distributed/distributed_data_parallel_config.py:157), so they are off while it allocates. Delete when pools
  can have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The ProcessGroupNCCL of a group over NCCL."""
    own: Any = group  # torch has no annotations of private names
    return own._get_backend(device)


@contextmanager
def fixed_segments(environ: Mapping[str, str]) -> Iterator[None]:
    """Context in which what is allocated lies in segments that do not grow.

    Args:
        environ: the environment that torch was imported in, whose other settings stay.
    """
    settings = environ.get("PYTORCH_ALLOC_CONF") or environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    fixed = settings.replace("expandable_segments:True", "expandable_segments:False")
    if fixed == settings:
        yield
        return
    change: Any = vars(torch._C)["_accelerator_setAllocatorSettings"]
    change(fixed)  # with all others, because some go back to their defaults
    try:
        yield
    finally:
        change(settings)
