"""GPUs as torch and their driver see them: memory, errors, throttling, links. No GPU has run this yet."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.collect_env import get_nvidia_driver_version, run

from patch.device import unusable_gpus
from patch.numbers import counted, size_text
from toolkits.doctor.check import Finding, Settings, graded, run_program

_SMI_S = 10.0
_FIELDS = (
    "memory.used", "ecc.errors.uncorrected.volatile.total", "pcie.link.width.current", "pcie.link.width.max",
    "clocks_throttle_reasons.active", "temperature.gpu", "mig.mode.current",
)  # fmt: skip
"""What nvidia-smi is asked of each GPU; all of it in an NVML of 2021 and newer."""
_SLOW_REASONS = {0x4: "power cap", 0x8: "hardware slowdown", 0x20: "software thermal limit",
                 0x40: "hardware thermal limit", 0x80: "power brake"}  # fmt: skip
"""Bits of NVML's nvmlClocksThrottleReason* that make a GPU slower than its clocks allow. The power cap is
normal under load; the doctor asks an idle GPU."""


def check_gpus(settings: Settings) -> Iterator[Finding]:
    """Which GPUs torch has, and why not if there are some that it has not."""
    yield check_torch_sees_gpus(settings)
    if not settings.has_gpus:
        return
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        value = f"{gpu.name}, {size_text(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        data = {
            "name": gpu.name, "memory_bytes": gpu.total_memory, "capability": [gpu.major, gpu.minor],
            "numa_node": settings.machine.gpu_nodes[index],
        }  # fmt: skip
        yield Finding(f"GPU {index}", "ok", value, data=data)
    yield from health_of(_ask_driver(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"))
    yield from _links(torch.cuda.device_count())


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


def health_of(rows: str) -> Iterator[Finding]:
    """What nvidia-smi answers, as findings of the GPUs that need care.

    Args:
        rows: a line of `_FIELDS` for each GPU, as CSV; what a GPU does not know is [N/A].
    """
    for index, row in enumerate(line for line in rows.splitlines() if line.strip()):
        used, errors, width, most, reasons, heat, mig = (text.strip() for text in row.split(","))
        if errors.isdigit() and int(errors):
            cure = "reset or drain this GPU: its memory loses data"
            yield Finding(f"GPU {index} memory errors", "broken", f"{errors} uncorrected", cure)
        if used.isdigit() and int(used) > 1024:
            cure = "end the other processes on it (nvidia-smi lists them): their memory is missing to a run"
            yield Finding(f"GPU {index} in use", "warning", f"{int(used):,} MiB are taken", cure)
        if width.isdigit() and most.isdigit() and int(width) < int(most):
            cure = "reseat the card, or ask the provider: copies to the host are slower"
            yield Finding(f"GPU {index} PCIe", "warning", f"{width} of {most} lanes", cure)
        bits = int(reasons, 16) if reasons.startswith("0x") else 0
        if slow := [text for bit, text in _SLOW_REASONS.items() if bits & bit]:
            what = f"{', '.join(slow)} at {heat} C"
            yield Finding(f"GPU {index} throttled", "warning", what, "look at cooling and the power supply")
        if mig == "Enabled":
            what = "cut in instances (MIG)"
            yield Finding(f"GPU {index}", "warning", what, "NCCL takes one instance a process, not several")


def _links(count: int) -> Iterator[Finding]:
    """Which pairs of GPUs read each other's memory, and by what nvidia-smi says that they are linked."""
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if not pairs:
        return
    blind = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    cure = "switch off ACS and the IOMMU for them, or keep TP inside the pairs that can"
    what = f"{len(pairs) - len(blind)} of {len(pairs)} directions between GPUs without the host"
    topology = _ask_driver("topo", "-m")
    yield graded("GPU links", what, bool(blind), cure, topology=topology, without_peer_access=blind)


def _ask_driver(*question: str) -> str:
    """What nvidia-smi answers; nothing where it is missing or fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    ended = run_program(["nvidia-smi", *question], _SMI_S)
    return ended.output if ended.code == 0 else ""
