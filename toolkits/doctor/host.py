"""Processor, memory, limits of containers and of the shell, the cores of a rank, variables, interfaces."""

from __future__ import annotations

import math
import os
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil
from torch.utils.collect_env import get_cpu_info, run

from patch.distributed.launch import cores_of_workers
from patch.numbers import counted, size_text
from toolkits.doctor.check import Finding, Settings, graded

_SYSTEM, _INFINIBAND = Path("/sys/devices/system"), Path("/sys/class/infiniband")
_MIN_SHM_BYTES = 1 << 30
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
    facts = dict(line.strip().split(":", 1) for line in get_cpu_info(run).splitlines() if ":" in line)
    name, sockets, nodes = (facts.get(key, "").strip() for key in ("Model name", "Socket(s)", "NUMA node(s)"))
    counts = {"cores": cores, "online": online, "sockets": _count(sockets), "numa_nodes": _count(nodes)}
    value = f"{name or os.uname().machine}, {counted(cores, 'core')} usable of {online}"
    more = f"{counted(counts['sockets'], 'socket')}, {counted(counts['numa_nodes'], 'NUMA node')}"
    yield Finding("processor", "ok", f"{value}, {more}", data=counts)
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
    locked = math.inf if _INFINIBAND.is_dir() else 0
    for name, kind, least, cure in (
        ("open files", resource.RLIMIT_NOFILE, 4096, "-n 65536 (many ranks and files of a checkpoint)"),
        ("processes", resource.RLIMIT_NPROC, 4096, "-u unlimited (each rank has tens of threads)"),
        ("locked memory", resource.RLIMIT_MEMLOCK, locked,
         "-l unlimited (docker: --ulimit memlock=-1): InfiniBand registers memory"),
    ):  # fmt: skip
        value = resource.getrlimit(kind)[0]
        is_unlimited = value == resource.RLIM_INFINITY
        what = "unlimited" if is_unlimited else f"{value:,}"
        yield graded(name, what, not is_unlimited and value < least, f"ulimit {cure}")


def check_ranks(settings: Settings, nodes: Path = _SYSTEM / "node") -> Iterator[Finding]:
    """Threads and cores of each rank as the launcher gives them."""
    machine, num_ranks = settings.machine, settings.num_processes
    threads = max(1, machine.cpu_cores // num_ranks)
    data = {"ranks": num_ranks, "threads": threads}
    yield Finding("threads of a rank", "ok", f"{threads}, of {counted(num_ranks, 'rank')} here", data=data)
    if len(list(nodes.glob("node[0-9]*"))) < 2:
        return
    shares = cores_of_workers(machine, num_ranks, nodes)
    bound = f"each bound to {counted(len(shares[0]), 'core')}" if shares else ""
    yield Finding("NUMA nodes of ranks", "ok", bound or "not bound: the nodes do not suit them")
    if not bound and _text(Path("/proc/sys/kernel/numa_balancing")) == "1":
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


def check_network(settings: Settings) -> Iterator[Finding]:
    """Addresses are not reported, only kinds and the names of interfaces."""
    states = psutil.net_if_stats()
    up = {name: state.speed for name, state in states.items() if state.isup and name != "lo"}
    shown = [f"{name}{f' ({speed / 1e3:g} Gbit/s)' if speed else ''}" for name, speed in up.items()]
    yield Finding("interfaces", "ok", ", ".join(shown) or "none but lo", data={"mbit_per_s": up})
    addresses = {
        name: [entry.address for entry in entries if entry.family == socket.AF_INET]
        for name, entries in psutil.net_if_addrs().items()
    }
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        found = []
    yield own_name(sorted({str(entry[4][0]) for entry in found}), addresses)
    yield from interface_variables(os.environ, list(states))
    yield from _infiniband()


def own_name(resolved: Sequence[str], addresses: Mapping[str, Sequence[str]]) -> Finding:
    """Whether other machines reach this one at the address that its own name has: gloo announces that one.

    Args:
        resolved: the addresses of this machine's name.
        addresses: the addresses of each interface.
    """
    owners = sorted(name for name, own in addresses.items() if set(own) & set(resolved))
    fault = "" if owners else "has an address that no interface has"
    if not resolved:
        fault = "has no address: gloo takes the loopback"
    elif all(address.startswith("127.") for address in resolved):
        fault = "is a loopback address (127.x)"
    cure = "only for several machines: set GLOO_SOCKET_IFNAME to the interface that they share"
    what = fault or f"gloo takes {', '.join(owners)}"
    return graded("this machine's name", what, bool(fault), cure, interfaces=owners)


def interface_variables(environ: Mapping[str, str], interfaces: Sequence[str]) -> Iterator[Finding]:
    """Interfaces that variables name, but that are not here.

    Args:
        environ: the environment.
        interfaces: the names of those that are here.
    """
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        # NCCL: "^" excludes, "=" is exact; otherwise beginnings of names.
        value = environ.get(variable, "")
        names = [name for name in value.removeprefix("=").split(",") if name]
        is_exact = value.startswith("=") or variable.startswith("GLOO")
        known = [n for n in names if any(i == n or (not is_exact and i.startswith(n)) for i in interfaces)]
        if names and not value.startswith("^") and not known:
            cure = f"unset {variable}, or name one of {', '.join(interfaces)}"
            yield Finding(variable, "broken", f"{value} is no interface here", cure)


def _infiniband() -> Iterator[Finding]:
    ports = sorted(_INFINIBAND.glob("*/ports/*/state"))
    if not ports:
        return
    states = {f"{port.parts[-4]}:{port.parts[-2]}": port.read_text().split(":")[-1].strip() for port in ports}
    down = [name for name, state in states.items() if state != "ACTIVE"]
    what = f"{len(states) - len(down)} of {len(states)} ports active"
    cure = f"look at cables and the subnet manager: {', '.join(down)}"
    yield graded("InfiniBand", what, bool(down), cure, ports=states)


def _count(text: str) -> int:
    """A number of things of which there is at least one."""
    return max(1, int(text)) if text.isdigit() else 1


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
