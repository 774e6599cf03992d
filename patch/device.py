"""What this machine is, and the device this process computes on.

`MachineFacts` is probed once, by the launcher, and decides how many processes a run gets.
`DeviceContext` belongs to one process: CUDA with NCCL where there is a GPU, the CPU with gloo otherwise.
torch is imported only when asked, so that the rows below can use the facts without it.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MachineFacts:
    """The part of this machine that a run may use."""

    cuda_devices: int
    cpu_cores: int
    """Cores this process may run on: affinity, not what the box holds."""

    cuda_memory_bytes: int = 0
    """Memory of one GPU; 0 without any."""

    @staticmethod
    def probe() -> MachineFacts:
        """Look at this machine; imports torch to count the GPUs, where there can be any."""
        cores = len(os.sched_getaffinity(0))
        if not _has_cuda_driver():
            return MachineFacts(cuda_devices=0, cpu_cores=cores)
        import torch

        devices = torch.cuda.device_count()
        return MachineFacts(
            cuda_devices=devices,
            cpu_cores=cores,
            cuda_memory_bytes=torch.cuda.get_device_properties(0).total_memory if devices else 0,
        )


def _has_cuda_driver() -> bool:
    """Whether the library is there through which torch reaches GPUs; a launcher without it needs no torch."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@dataclass(frozen=True)
class DeviceContext:
    """Where this process computes and how it talks to the others."""

    device: torch.device
    backend: str
    """torch.distributed backend: nccl or gloo."""

    @property
    def is_cuda(self) -> bool:
        """Whether tensors live on a GPU."""
        return self.device.type == "cuda"

    @staticmethod
    def select(local_rank: int) -> DeviceContext:
        """The GPU of this local rank, made current, or the CPU where there is none."""
        import torch

        if not torch.cuda.is_available():
            return DeviceContext(torch.device("cpu"), "gloo")
        torch.cuda.set_device(local_rank)
        return DeviceContext(torch.device("cuda", local_rank), "nccl")
