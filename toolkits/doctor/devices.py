"""Processor, memory, network interfaces, and GPUs as torch sees them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch.utils.collect_env import get_nvidia_driver_version, run

from patch.device import unusable_gpus
from patch.numbers import counted, size_text
from toolkits.doctor.check import Finding, Settings, graded

_MIN_SHM_BYTES = 1 << 30


def check_host(settings: Settings) -> Iterator[Finding]:
    """Cores and load, host memory, shared memory, and the speed of network interfaces."""
    cores, load = settings.machine.cpu_cores, os.getloadavg()[0]
    yield Finding("processor", "ok", f"{counted(cores, 'core')} usable of {os.cpu_count()}")
    advice = "speeds in this report are too low: other work uses this machine; repeat without it"
    yield graded("load", f"{load:.1f}", load > max(1.0, 0.75 * cores), advice, load=load)
    total, usable = psutil.virtual_memory().total, settings.machine.host_memory_bytes
    limit = f", {size_text(usable)} by the cgroup's limit" if usable < total else ""
    data = {"total_bytes": total, "usable_bytes": usable}
    yield Finding("memory", "ok", f"{size_text(total)}{limit}", data=data)
    shared = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0
    advice = "NCCL and data workers need more: start the container with --ipc=host or --shm-size=8g"
    yield graded("shared memory", f"/dev/shm has {size_text(shared)}", shared < _MIN_SHM_BYTES, advice)
    states = psutil.net_if_stats().items()
    up = {name: state.speed for name, state in states if state.isup and name != "lo"}
    shown = [f"{name}{f' ({speed / 1e3:g} Gbit/s)' if speed else ''}" for name, speed in up.items()]
    yield Finding("interfaces", "ok", ", ".join(shown) or "none but lo", data={"mbit_per_s": up})


def check_gpus(settings: Settings) -> Iterator[Finding]:
    """The GPUs that torch has."""
    yield check_torch_sees_gpus(settings)
    count = torch.cuda.device_count() if settings.has_gpus else 0
    for index in range(count):
        gpu = torch.cuda.get_device_properties(index)
        value = f"{gpu.name}, {size_text(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        yield Finding(f"GPU {index}", "ok", value, data={"name": gpu.name, "memory_bytes": gpu.total_memory})


def check_torch_sees_gpus(settings: Settings, nodes: Path = Path("/dev")) -> Finding:
    """Whether the machine's GPUs, if it has any, can be used.

    Args:
        settings: with what torch sees.
        nodes: the folder of device nodes.
    """
    unusable, present = unusable_gpus(nodes), len(list(nodes.glob("nvidia[0-9]*")))
    if settings.has_gpus:
        driver, count = get_nvidia_driver_version(run) or "unknown", settings.machine.cuda_devices
        what = f"{counted(count, 'GPU')}, driver {driver}, torch's CUDA {torch.version.cuda}"
        return Finding("GPUs", "ok", what, data={"count": count, "driver": driver})
    if unusable is not None:
        return Finding("GPUs", "broken", *unusable)
    cure = "unset CUDA_VISIBLE_DEVICES; of a scheduler ask for GPUs (SLURM: --gres)"
    what = f"{present} hidden from this process" if present else "none: runs train on the CPU, over gloo"
    return graded("GPUs", what, present > 0, cure)
