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

    gpu_nodes: tuple[int, ...] = ()
    """The NUMA node of each GPU; -1 if not known."""

    cuda_name: str = ""
    """The first GPU's name, as its driver reports it."""

    libraries: frozenset[str] = frozenset()
    """The libraries of `GPU_LIBRARIES` that are installed."""

    multiplies_16_bits: bool = True
    """Whether the CPU has instructions for products in 16 bits, which else take many times as long as in
    fp32."""

    unusable_gpus: str = ""
    """Why torch cannot use GPUs that are here, and the cure; see `unusable_gpus`."""

    @staticmethod
    def probe(nodes: Path = Path("/dev")) -> MachineFacts:
        """Look at this machine; imports torch to count the GPUs, if there is a CUDA driver.

        Args:
            nodes: the folder of device nodes.
        """
        gpus: list[Any] = []  # torch has no annotations of their PCI numbers
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
            gpu_nodes=tuple(numa_node(gpu.pci_domain_id, gpu.pci_bus_id, gpu.pci_device_id) for gpu in gpus),
            libraries=installed_libraries(),
            multiplies_16_bits=bool(gpus) or multiplies_16_bits(),
            unusable_gpus=": ".join(unusable or ()),
        )


def unusable_gpus(nodes: Path = Path("/dev")) -> tuple[str, str] | None:
    """Why torch cannot use GPUs that are here, and the cure; imports torch if there are any.

    None where it can, or where there are none for this process. torch's own figures are not asked first: it
    counts GPUs by NVML, also where the driver is too old for it.

    Args:
        nodes: the folder of device nodes.
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
"""Values of CUDA_VISIBLE_DEVICES by which users and SLURM give a process no GPU."""
_NO_DEVICE = 100
"""cuda.h: CUDA_ERROR_NO_DEVICE; the driver works, and has none for this process."""


def present_gpus(nodes: Path = Path("/dev")) -> int:
    """GPUs for this process by NVIDIA's driver, without torch; where that fails, nodes that can be opened.

    Args:
        nodes: the folder of device nodes; a virtual machine of Windows has none.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in _HIDDEN:
        return 0
    count = ctypes.c_int(0)
    with suppress(OSError, AttributeError):  # there is no driver, or none of NVIDIA
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
    """The error of torch when it is made to use CUDA; None if it can."""
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
    "flash_attn_3": ("flash_attn_interface",),
}
"""Libraries with kernels that are used where they are found, and their modules or distributions."""


def installed_libraries() -> frozenset[str]:
    """The libraries of `GPU_LIBRARIES` that are installed; none is imported, which takes seconds."""
    return frozenset(name for name, parts in GPU_LIBRARIES.items() if all(map(_is_installed, parts)))


def _is_installed(name: str) -> bool:
    """Whether a module or distribution of this name can be found: source builds have either."""
    if importlib.util.find_spec(name) is not None:
        return True
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


_CGROUPS, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def multiplies_16_bits(processor: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the CPU has instructions for products in 16 bits: AMX, ARM's BF16, or AVX-512.

    Args:
        processor: the file in which Linux lists what it can do.
    """
    try:
        words = set(processor.read_text().split())
    except OSError:
        return True
    return not words.isdisjoint({"amx_bf16", "bf16", "avx512bw"})  # oneDNN emulates them with AVX-512 only


def usable_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Cores that this process may keep busy: those of its affinity, or fewer if a cgroup has a quota.

    Args:
        cgroups: the folder where cgroups of version 2 or 1 are mounted.
        own: the file that names the cgroups of this process.
    """
    folders = _own_cgroups(cgroups, own, "cpu")
    quotas = [quota for folder in folders if (quota := _quota(folder)) is not None]
    return max(1, min([len(os.sched_getaffinity(0)), *map(int, quotas)]))


def usable_memory(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Bytes of host memory: all of the machine, or less if a cgroup has a limit.

    Args:
        cgroups: see `usable_cores`.
        own: see `usable_cores`.
    """
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for folder in _own_cgroups(cgroups, own, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):  # version 2, 1
            text = (folder / name).read_text().strip() if (folder / name).is_file() else "max"
            if text != "max":
                limits.append(int(text))
    return min(limits)


def numa_node(domain: int, bus: int, device: int, pci: Path = Path("/sys/bus/pci/devices")) -> int:
    """The NUMA node of a PCI device; -1 if not known.

    Args:
        domain: the device's PCI domain.
        bus: its PCI bus.
        device: its number on the bus.
        pci: the folder where Linux describes PCI devices.
    """
    try:
        return int((pci / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node").read_text())
    except OSError:
        return -1


def _own_cgroups(cgroups: Path, own: Path, controller: str) -> list[Path]:
    """This process's cgroups that `controller` may limit, all their parents, and the mount point."""
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
    """Cores that a cgroup may use, as a fraction of time; None if it has no limit.

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
        """The GPU of this local rank, which becomes the current one; the CPU on a machine without GPUs.

        A scheduler may show each process its own GPU only.
        """
        import torch

        if not torch.cuda.is_available():
            return DeviceContext(torch.device("cpu"), "gloo")
        index = local_rank if torch.cuda.device_count() > 1 else 0
        torch.cuda.set_device(index)
        return DeviceContext(torch.device("cuda", index), "nccl")


FloatType = Literal["fp32", "bf16", "fp16"]
"""A type that `torch_dtype` knows, by its name in the configuration and on command lines."""
FLOAT_TYPES: tuple[FloatType, ...] = get_args(FloatType)


def is_finite(values: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite; needs no memory of the tensor's size."""
    return not values.numel() or all(math.isfinite(end) for end in values.aminmax())  # of NaN both are NaN


def torch_dtype(name: FloatType) -> torch.dtype:
    """The torch type of a name."""
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]


def streams_of(device: torch.device) -> Any:
    """torch's module with the streams of a device: `torch.cuda`, or `torch.cpu`, whose streams do nothing."""
    import torch

    return torch.get_device_module(device)


@cache
def stream_of(device: torch.device, purpose: str) -> Any:
    """The one stream of a device for a purpose, such as "gathers"; on a CPU it does nothing.

    torch hands out the same 32 streams in turn, to NCCL too. Who took a new one for each call would soon have
    that of a communicator, and wait for all messages that are queued there.

    Source: c10/cuda/CUDAStream.h.
    """
    return streams_of(device).Stream(device)


def same_device() -> Callable[[], None]:
    """A function that another thread calls first, to compute on the device of the thread that calls this.

    Otherwise a thread is on GPU 0: the end of a stream context, or memory that it happens to free, would
    create a context there, which takes half a GB of it.
    """
    torch = sys.modules.get("torch")  # who has not imported it has no device
    module = torch.get_device_module() if torch is not None else None
    if module is None or not module.is_initialized():
        return lambda: None
    return partial(module.set_device, module.current_device())


def start_thread(name: str, work: Callable[[], object], *, daemon: bool = True) -> threading.Thread:
    """Start a thread, on the device of this one; all threads of the project are started here.

    Args:
        name: of the thread, in stacks and logs.
        work: what it does; errors are its own to report.
        daemon: whether the process may end before it.
    """
    set_device = same_device()

    def run() -> None:
        set_device()
        work()

    thread = threading.Thread(target=run, name=name, daemon=daemon)
    thread.start()
    return thread


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded; `torch.cuda.nccl.version()` is the one torch was built with."""
    import torch

    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except OSError:  # built into torch
        return tuple(torch.cuda.nccl.version())
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a CPU tensor on `device`; through pinned memory, so that the host does not wait for it."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
