"""Facts of this machine, and the device on which this process computes.

`MachineFacts` is probed once, by the launcher, and decides how many processes a run gets.
`DeviceContext` belongs to one process: CUDA with NCCL where there is a GPU, the CPU with gloo otherwise.
torch is imported only inside functions, so that packages without torch can use this module.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MachineFacts:
    """The part of this machine that a run may use."""

    cuda_devices: int
    cpu_cores: int
    """Cores that this process may use, by its affinity and its cgroups' quotas."""
    cuda_memory_bytes: int = 0
    """Memory of the first GPU; 0 without a GPU."""
    host_memory_bytes: int = 0
    """Host memory that all processes of this machine may use; 0 if not known."""
    compute_capability: tuple[int, int] = (0, 0)
    """Compute capability of the first GPU, major and minor; zeros without a GPU."""
    gpu_cores: tuple[frozenset[int], ...] = ()
    """The cores of each GPU's NUMA node; empty if not known."""
    cuda_name: str = ""
    libraries: frozenset[str] = frozenset()
    """The libraries of `GPU_LIBRARIES` that are installed."""
    multiplies_16_bits: bool = True
    """Whether the CPU has 16-bit matmul instructions; without them 16 bits are much slower than fp32."""
    unusable_gpus: str = ""
    """Why torch cannot use GPUs that are present, and the cure; see `unusable_gpus`."""

    @staticmethod
    def probe(nodes: Path = Path("/dev")) -> MachineFacts:
        """Probe this machine. torch is imported, to count the GPUs, only if there is a CUDA driver."""
        gpus: list[Any] = []  # torch does not annotate the PCI numbers
        unusable = unusable_gpus(nodes)
        if unusable is None and present_gpus(nodes):
            import torch

            gpus = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
        return MachineFacts(
            cuda_devices=len(gpus),
            cpu_cores=usable_cores(),
            cuda_memory_bytes=gpus[0].total_memory if gpus else 0,
            host_memory_bytes=usable_memory(),
            compute_capability=(gpus[0].major, gpus[0].minor) if gpus else (0, 0),
            cuda_name=gpus[0].name if gpus else "",
            gpu_cores=tuple(near_cores(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id) for gpu in gpus),
            libraries=installed_libraries(),
            multiplies_16_bits=bool(gpus) or multiplies_16_bits(),
            unusable_gpus=": ".join(unusable or ()),
        )


def unusable_gpus(nodes: Path = Path("/dev")) -> tuple[str, str] | None:
    """Return why torch cannot use GPUs that are present, and the cure; imports torch if there are GPUs.

    Return None if torch can use the GPUs, or if this process has none. torch's device count is not reliable:
    torch counts by NVML, which also counts GPUs whose driver is too old.
    """
    present = present_gpus(nodes)
    if not present:
        return None
    import torch

    if torch.version.cuda is None:
        why, cure = "torch is a build for CPUs", "install torch's CUDA build (the one of PyPI)"
    elif (error := _cuda_error()) is None:
        return None
    else:
        why = f"torch cannot use them ({error})"
        cure = "a driver as new as torch's CUDA, or nvidia-container-toolkit (--gpus all) in a container"
    return f"GPUs are here ({present}), but {why}", cure


_HIDDEN = ("", "-1", "NoDevFiles")
"""Values of CUDA_VISIBLE_DEVICES with which users and SLURM hide all GPUs from a process."""
_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE of cuda.h: the driver works, but has no GPU for this process."""


def present_gpus(nodes: Path = Path("/dev")) -> int:
    """Return the number of GPUs of this process by NVIDIA's driver, without torch.

    If the driver fails, count the device nodes that can be opened; a Windows virtual machine has no nodes.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return 0
    count = ctypes.c_int(0)
    with suppress(OSError, AttributeError):  # there is no driver, or it is not NVIDIA's
        driver = ctypes.CDLL("libcuda.so.1")
        if (driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))) in (0, _NO_DEVICE):
            return count.value
    return sum(map(_can_be_opened, nodes.glob("nvidia[0-9]*")))


def _can_be_opened(node: Path) -> bool:
    try:
        node.open("rb").close()
    except OSError:
        return False
    return True


def _cuda_error() -> str | None:
    import torch

    try:
        for gpu in range(max(1, torch.cuda.device_count())):
            torch.cuda.get_device_properties(gpu)
    except (RuntimeError, AssertionError) as error:
        return str(error).split("\n", 1)[0]
    return None


GPU_LIBRARIES = {
    "triton": ("triton",),
    "transformer_engine": ("transformer_engine", "transformer_engine_torch"),
    "flash_attn": ("flash_attn_2_cuda",),
    "flash_attn_3": ("flash_attn_interface",),
    "flash_attn_4": ("flash-attn-4",),
}
"""Kernel libraries that are used if installed, and their modules or distributions."""


def installed_libraries() -> frozenset[str]:
    """Return the installed libraries of `GPU_LIBRARIES`, without importing them, which takes seconds."""
    return frozenset(name for name, parts in GPU_LIBRARIES.items() if all(map(_is_installed, parts)))


def _is_installed(name: str) -> bool:
    """Return whether a module or a distribution has this name; source builds may have only one of them."""
    return importlib.util.find_spec(name) is not None or installed_version(name) is not None


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def multiplies_16_bits(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU has 16-bit matmul instructions: AMX, ARM's BF16, or AVX-512."""
    try:
        words = set(processor.read_text().split())
    except OSError:
        return True
    return not words.isdisjoint({"amx_bf16", "bf16", "avx512bw"})  # oneDNN emulates them with AVX-512 only


def usable_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the cores that this process may keep busy: its affinity, or a cgroup's (v1 or v2) quota."""
    folders = _own_cgroups(cgroups, own, "cpu")
    quotas = [quota for folder in folders if (quota := _quota(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def usable_memory(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the bytes of host memory: all of the machine, or less if a cgroup has a limit."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _own_cgroups(cgroups, own, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, 1
            text = (folder / name).read_text().strip() if (folder / name).is_file() else "max"
            if text != "max":
                limits.append(int(text))
    return min(limits)


def near_cores(
    domain: int, bus: int, device: int, pci: Path = Path("/sys/bus/pci/devices")
) -> frozenset[int]:
    """Return the cores of a PCI device's NUMA node: all cores if it has none, empty if it is unknown."""
    try:
        text = (pci / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "local_cpulist").read_text().strip()
    except OSError:
        return frozenset()
    ranges = [part.partition("-") for part in text.split(",") if part]  # such as 0-3,8,10-11
    return frozenset(core for first, _, last in ranges for core in range(int(first), int(last or first) + 1))


def _own_cgroups(cgroups: Path, own: Path, controller: str) -> list[Path]:
    """Return this process's cgroups that `controller` may limit, all their parents, and the mount point."""
    # The mount point, because the path of a container's cgroup may not be mounted inside the container.
    folders = [cgroups, cgroups / controller]
    for line in own.read_text().splitlines() if own.exists() else []:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = cgroups / controller if controllers else cgroups
            below = root / path.strip("/")
            folders += [below, *(folder for folder in below.parents if root in folder.parents)]
    return folders


def _quota(cgroup: Path) -> float | None:
    """Return the cores that a cgroup may use, as a fraction of time, or None if it has no limit.
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


@dataclass(frozen=True)
class DeviceContext:
    """Device of this process, and the backend for communication with other processes."""

    device: torch.device
    backend: str
    """torch.distributed backend: nccl or gloo."""

    @property
    def is_cuda(self) -> bool:
        """Whether tensors live on a GPU."""
        return self.device.type == "cuda"

    @staticmethod
    def select(local_rank: int) -> DeviceContext:
        """Select the GPU of this local rank and make it current, or select the CPU on a machine without GPUs.

        A scheduler may show each process its own GPU only.
        """
        import torch

        if not torch.cuda.is_available():
            return DeviceContext(torch.device("cpu"), "gloo")
        index = local_rank if torch.cuda.device_count() > 1 else 0
        torch.cuda.set_device(index)
        return DeviceContext(torch.device("cuda", index), "nccl")


FloatType = Literal["fp32", "bf16", "fp16"]
"""dtypes of `torch_dtype`, by their names in the configuration and on command lines."""
FLOAT_TYPES: tuple[FloatType, ...] = get_args(FloatType)


def is_finite(values: torch.Tensor) -> bool:
    """Return whether no value is NaN or infinite; needs no memory of the tensor's size."""
    return not values.numel() or all(math.isfinite(end) for end in values.aminmax())  # a NaN makes both NaN


def torch_dtype(name: FloatType) -> torch.dtype:
    """Return the torch dtype of a name."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def streams_of(device: torch.device) -> Any:
    """Return torch's stream module of a device: `torch.cuda`, or `torch.cpu`, whose streams do nothing."""
    import torch

    return torch.get_device_module(device)


@cache
def stream_of(device: torch.device, purpose: str) -> Any:
    """Return the one stream of a device for a purpose, such as "gathers"; on a CPU it does nothing.

    torch hands out the same 32 streams in turn, to NCCL too. If each call took a new stream, it would soon be
    a communicator's stream, and would wait for all messages queued there.

    Source: c10/cuda/CUDAStream.h.
    """
    return streams_of(device).Stream(device)


def device_setter() -> Callable[[], None]:
    """Return a function that a new thread calls first, to compute on the device of the present thread.

    Otherwise the new thread is on GPU 0. The end of a stream context, or memory that the thread frees, would
    create a CUDA context there, which takes half a GB.
    """
    torch = sys.modules.get("torch")  # without torch this process has no device
    module = torch.get_device_module() if torch is not None else None
    if module is None or not module.is_initialized():
        return lambda: None
    return partial(module.set_device, module.current_device())


def start_thread(name: str, work: Callable[[], object]) -> threading.Thread:
    """Start a thread on the device of the present thread. The process may end before the thread.

    The function `work` must report its errors itself. A ThreadPoolExecutor gets `device_setter` instead.
    """
    set_device = device_setter()

    def run() -> None:
        set_device()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy of a CPU tensor on `device`, through pinned memory so that the host does not wait."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
