"""Processor, memory, limits of containers and of the shell, and the cores of a rank."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from patch.device import MachineFacts
from patch.distributed.launch import cores_of_workers
from patch.storage.sizes import counted, size_text
from toolkits.doctor.check import Finding, Settings, graded

_SYSTEM = Path("/sys/devices/system")
_MIN_SHM_BYTES = 1 << 30
_MIN_OPEN_FILES, _MIN_PROCESSES = 4096, 4096
_GOOD_CLOCKS = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
_WATCHED = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "NCCL_DEBUG",
    "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_ALGO",
    "NCCL_PROTO", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCH_DISTRIBUTED_DEBUG",
)  # fmt: skip
"""The only variables whose values are reported."""
_HARMFUL = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel: nothing overlaps",
    "NCCL_P2P_DISABLE": "GPUs of a machine talk through host memory",
    "NCCL_IB_DISABLE": "machines talk over TCP instead of InfiniBand",
    "NCCL_SHM_DISABLE": "processes of a machine talk over sockets",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "each tensor asks the driver for memory",
}
"""Variables for debugging, that are on unless "" or 0."""


def check_processor(settings: Settings) -> Iterator[Finding]:
    """Processor, cores and their limits, load, clock."""
    cores, online = settings.machine.cpu_cores, os.cpu_count() or 1
    nodes = len(list((_SYSTEM / "node").glob("node[0-9]*"))) or 1
    sockets = len({file.read_text() for file in _SYSTEM.glob("cpu/cpu*/topology/physical_package_id")}) or 1
    value = f"{_processor_name()}, {counted(cores, 'core')} usable of {online}, {counted(sockets, 'socket')}"
    data = {"cores": cores, "online": online, "sockets": sockets, "numa_nodes": nodes}
    yield Finding("processor", "ok", f"{value}, {counted(nodes, 'NUMA node')}", data=data)
    load = os.getloadavg()[0]
    # Some load is the doctor's own.
    is_busy = load > max(1.0, 0.75 * cores)
    advice = "speeds in this report are too low: other work uses this machine; repeat without it"
    yield graded("load", f"{load:.1f}", is_busy, advice, load=load)
    source = _text(_SYSTEM / "clocksource" / "clocksource0" / "current_clocksource")
    if source:
        advice = "reading the time is a system call here, which profiles and many small steps feel"
        yield graded("clock source", source, source not in _GOOD_CLOCKS, advice)


def check_memory(settings: Settings) -> Iterator[Finding]:
    """Host memory, and shared memory, which containers keep small."""
    import psutil

    total, usable = psutil.virtual_memory().total, settings.machine.host_memory_bytes
    free = min(psutil.virtual_memory().available, usable)
    limit = f", {size_text(usable)} by the cgroup's limit" if usable < total else ""
    data = {"total_bytes": total, "usable_bytes": usable, "free_bytes": free}
    yield Finding("memory", "ok", f"{size_text(total)}{limit}, {size_text(free)} free", data=data)
    try:
        shared = shutil.disk_usage("/dev/shm").total
    except OSError:
        shared = 0
    advice = "NCCL and data workers need more: start the container with --ipc=host or --shm-size=8g"
    what = f"/dev/shm has {size_text(shared)}"
    yield graded("shared memory", what, shared < _MIN_SHM_BYTES, advice, bytes=shared)


def check_limits(settings: Settings) -> Iterator[Finding]:
    """Limits of the shell (`ulimit`)."""
    cure = "ulimit -n 65536 (many ranks and files of a checkpoint)"
    yield _limit("open files", resource.RLIMIT_NOFILE, _MIN_OPEN_FILES, cure)
    cure = "ulimit -u unlimited (each rank has tens of threads)"
    yield _limit("processes", resource.RLIMIT_NPROC, _MIN_PROCESSES, cure)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    needs_locked = Path("/sys/class/infiniband").is_dir()
    is_limited = needs_locked and locked != resource.RLIM_INFINITY
    advice = "ulimit -l unlimited (docker: --ulimit memlock=-1): InfiniBand registers memory"
    yield graded("locked memory", _limit_text(locked), is_limited, advice)


def check_ranks(settings: Settings, nodes: Path = _SYSTEM / "node") -> Iterator[Finding]:
    """Threads and cores of each rank as the launcher gives them."""
    machine, num_ranks = settings.machine, settings.num_processes
    threads = max(1, machine.cpu_cores // num_ranks)
    data = {"ranks": num_ranks, "threads": threads}
    yield Finding("threads of a rank", "ok", f"{threads}, of {counted(num_ranks, 'rank')} here", data=data)
    if len(list(nodes.glob("node[0-9]*"))) < 2:
        return
    shares = cores_of_workers(machine, num_ranks, nodes)
    what = (
        f"each bound to {counted(len(shares[0]), 'core')}"
        if shares
        else "not bound: the nodes do not suit them"
    )
    yield Finding("NUMA nodes of ranks", "ok", what)
    is_balancing = shares is None and _text(Path("/proc/sys/kernel/numa_balancing")) == "1"
    if is_balancing:
        advice = "sysctl kernel.numa_balancing=0: the kernel moves pages while the optimizer reads them"
        yield Finding("NUMA balancing", "warning", "on, and ranks are not bound", advice)


def check_variables(settings: Settings) -> Iterator[Finding]:
    """Environment variables that change how a run computes or talks."""
    for name in _WATCHED:
        if (value := os.environ.get(name)) is None:
            continue
        harm = _HARMFUL.get(name) if value not in ("", "0") else None
        if name == "TORCH_DISTRIBUTED_DEBUG" and value == "DETAIL":
            harm = "each collective is checked by another one"
        yield graded(name, value, harm is not None, f"unset {name}: {harm}")


def local_processes(machine: MachineFacts) -> int:
    """How many processes a measurement between processes starts by default: one a GPU, or two."""
    return machine.cuda_devices or 2


def _limit(name: str, kind: int, least: int, cure: str) -> Finding:
    value = resource.getrlimit(kind)[0]
    return graded(name, _limit_text(value), value != resource.RLIM_INFINITY and value < least, cure)


def _limit_text(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"


def _processor_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return os.uname().machine


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
