"""What this machine is, and the device this process computes on.

`MachineFacts` is probed once, by the launcher, and decides how many processes a run gets.
`DeviceContext` belongs to one process: CUDA with NCCL where there is a GPU, the CPU with gloo otherwise.
torch is imported only when asked, so that the rows below can use the facts without it.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MachineFacts:
    """The part of this machine that a run may use."""

    cuda_devices: int
    cpu_cores: int
    """Cores' worth of time this process may use: affinity and cgroup quota, not what the box holds."""

    cuda_memory_bytes: int = 0
    """Memory of one GPU; 0 without any."""

    host_memory_bytes: int = 0
    """Host memory that all processes of this machine may use; 0: not known."""

    compute_capability: int = 0
    """Major number of the first GPU's; 0 without any."""

    gpu_nodes: tuple[int, ...] = ()
    """The NUMA node of each GPU; -1: not known."""

    @staticmethod
    def probe() -> MachineFacts:
        """Look at this machine; imports torch to count the GPUs, where there can be any."""
        cores, host = usable_cores(), usable_memory()
        if not _has_cuda_driver():
            return MachineFacts(cuda_devices=0, cpu_cores=cores, host_memory_bytes=host)
        import torch

        gpus = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
        return MachineFacts(
            cuda_devices=len(gpus),
            cpu_cores=cores,
            cuda_memory_bytes=gpus[0].total_memory if gpus else 0,
            host_memory_bytes=host,
            compute_capability=gpus[0].major if gpus else 0,
            gpu_nodes=tuple(
                numa_node(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id)  # type: ignore[attr-defined]
                for gpu in gpus
            ),
        )


_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Cores that this process may keep busy: those of its affinity, or fewer where a cgroup has a quota.

    Args:
        cgroups: where cgroups are mounted, version 2 or 1. own: the file that names this process's.
    """
    folders = _own_cgroups(cgroups, own, "cpu")
    quotas = [quota for folder in folders if (quota := _quota(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def usable_memory(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Bytes of host memory: what the machine has, or less where a cgroup has a limit.

    Args:
        as for `usable_cores`.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _own_cgroups(cgroups, own, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, 1
            text = (folder / name).read_text().strip() if (folder / name).is_file() else "max"
            limits += [int(text)] if text != "max" else []
    return min(limits)


def numa_node(domain: int, bus: int, device: int, pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """The NUMA node that a PCI device is at; -1: not known.

    Args:
        pci: the folder where Linux describes them.
    """
    try:
        return int((pci / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node").read_text())
    except OSError:
        return -1


def _own_cgroups(cgroups: Path, own: Path, controller: str) -> list[Path]:
    """This process's cgroups that `controller` may limit, each with all above it; the mount itself too."""
    # The mount itself: inside a container the path may name what is not mounted there.
    folders = [cgroups, cgroups / controller]
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = cgroups / controller if controllers else cgroups
            below = root / path.strip("/")
            folders += [below, *(folder for folder in below.parents if root in folder.parents)]
    return folders


def _quota(cgroup: Path) -> float | None:
    """Cores' worth of time a cgroup may take; None where it has no limit.

    Source: Linux's Documentation/admin-guide/cgroup-v2.rst (cpu.max), scheduler/sched-bwc.rst (cfs).
    """
    try:
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota, period = (
                (cgroup / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )
    except OSError:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


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


FloatType = Literal["fp32", "bf16", "fp16"]
"""A type that `torch_dtype` knows, by its name in the configuration and on command lines."""
FLOAT_TYPES: tuple[FloatType, ...] = get_args(FloatType)


def torch_dtype(name: str) -> torch.dtype:
    """torch's type of this name, which is one of FLOAT_TYPES."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def streams_of(device: torch.device) -> Any:
    """`torch.cuda`, or for the CPU `torch.cpu`, whose streams do nothing: all is done at the call there."""
    import torch

    return torch.get_device_module(device)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A CPU tensor on `device`, from pinned memory: else the host would wait for all that is queued there."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
