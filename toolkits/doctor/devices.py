"""Checks of processor, memory, network interfaces and GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
from torch.utils.collect_env import get_nvidia_driver_version, run

from patch.device import unusable_gpus
from patch.text import counted, size_text
from toolkits.doctor.check import Finding, Settings, graded


def check_host(settings: Settings) -> Iterator[Finding]:
    """Check cores, host memory, and the speed of network interfaces."""
    cores = counted(settings.machine.cpu_cores, "core")
    yield Finding("processor", "ok", f"{cores} usable of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}")
    total, usable = psutil.virtual_memory().total, settings.machine.host_memory_bytes
    limit = f", {size_text(usable)} by the cgroup's limit" if usable < total else ""
    data = {"total_bytes": total, "usable_bytes": usable}
    yield Finding("memory", "ok", f"{size_text(total)}{limit}", data=data)
    states = psutil.net_if_stats().items()
    up = {name: state.speed for name, state in states if state.isup and name != "lo"}
    shown = [f"{name}{f' ({speed / 1e3:g} Gbit/s)' if speed else ''}" for name, speed in up.items()]
    yield Finding("interfaces", "ok", ", ".join(shown) or "none but lo", data={"mbit_per_s": up})


def check_gpus(settings: Settings) -> Iterator[Finding]:
    """Check and list the GPUs that torch sees."""
    yield check_torch_sees_gpus(settings)
    for index in range(settings.machine.cuda_devices):
        gpu = torch.cuda.get_device_properties(index)
        value = f"{gpu.name}, {size_text(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        yield Finding(f"GPU {index}", "ok", value, data={"name": gpu.name, "memory_bytes": gpu.total_memory})


def check_torch_sees_gpus(settings: Settings, nodes: Path = Path("/dev")) -> Finding:
    """Return whether torch can use the machine's GPUs, if it has any.

    Args:
        nodes: folder of the device nodes.
    """
    unusable, present = unusable_gpus(nodes), len(list(nodes.glob("nvidia[0-9]*")))
    if count := settings.machine.cuda_devices:
        driver = get_nvidia_driver_version(run) or "unknown"
        what = f"{counted(count, 'GPU')}, driver {driver}, torch's CUDA {torch.version.cuda}"
        return Finding("GPUs", "ok", what, data={"count": count, "driver": driver})
    if unusable is not None:
        return Finding("GPUs", "broken", *unusable)
    cure = "unset CUDA_VISIBLE_DEVICES; of a scheduler ask for GPUs (SLURM: --gres)"
    what = f"{present} hidden from this process" if present else "none: runs train on the CPU, over gloo"
    return graded("GPUs", what, present > 0, cure)
