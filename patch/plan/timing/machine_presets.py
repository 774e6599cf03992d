"""The machines that are known: presets of NVIDIA's GPUs, this machine, and files of measured ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.errors import ConfigError, nearest
from patch.plan.flops import peak_flops
from patch.plan.timing.machine import MEASURED, Machine, Reached, mapping
from patch.storage.text_files import parse_yaml, read_text

_GIB, _TB = 2**30, 10**12

# Steps of NCCL's rings with its protocol for large messages: 3.6 us over NVLink, 14 us over a network (its
# tables of latencies, nccl/src/tuner). A kernel costs the host 10 us: 3,900 launches of 32 layers, 40 ms.
_NCCL: dict[str, Any] = {"node_link_latency": 3.6e-6, "network_latency": 14e-6, "launch_seconds": 10e-6}

# NVIDIA H100 SXM (data sheet of the H100): bf16 989.5 dense, fp8 twice that, fp32 67 TFLOP/s, 3.35 TB/s,
# NVLink 900 GB/s and PCIe 5.0 128 GB/s, both for both directions. DGX H100 (its data sheet): eight ports of
# 400 Gbit/s for eight GPUs, 2 TB, two Xeon 8480C of 56 cores, eight channels of DDR5-4800 each, eight NVMe
# disks of about 5 GB/s (assumed). 79.1 GiB is what torch reports.
_H100 = Machine(
    name="NVIDIA H100 80GB HBM3", devices_per_node=8, compute_capability=(9, 0),
    device_memory_bytes=int(79.1 * _GIB), fp32_flops=67e12, bf16_flops=989.5e12, fp8_flops=1979e12,
    device_bandwidth=3.35e12, node_link_bandwidth=450e9, network_bandwidth=50e9, host_memory_bytes=2 * _TB,
    host_cores=112, host_bandwidth=614e9, host_link_bandwidth=64e9, disk_bandwidth=40e9, **_NCCL,
)  # fmt: skip

PRESETS: dict[str, Machine] = {
    # NVIDIA A100 80GB SXM (data sheet): bf16 312 dense, fp32 19.5 TFLOP/s, 2.039 TB/s, NVLink 600 GB/s and
    # PCIe 4.0 64 GB/s, both for both directions. DGX A100 (its data sheet): eight ports of 200 Gbit/s, 2 TB,
    # two EPYC 7742 of 64 cores, eight channels of DDR4-3200 each. Power does not limit it: cuBLAS reaches
    # 255 TFLOP/s, FlashAttention-2 200 forward and 170 backward (arXiv 2307.08691, figures 5 and 6).
    "a100": Machine(
        name="NVIDIA A100-SXM4-80GB", devices_per_node=8, compute_capability=(8, 0),
        device_memory_bytes=int(79.15 * _GIB), fp32_flops=19.5e12, bf16_flops=312e12,
        device_bandwidth=2.039e12, node_link_bandwidth=300e9, network_bandwidth=25e9,
        host_memory_bytes=2 * _TB, host_cores=128, host_bandwidth=409e9, host_link_bandwidth=32e9,
        disk_bandwidth=20e9,
        reached=Reached(gemm=0.82, attention_forward=0.65, attention_backward=0.55, sustained=1.0), **_NCCL,
    ),
    "h100": _H100,
    # NVIDIA H200 SXM (data sheet): an H100 with 141 GB at 4.8 TB/s. DGX H200: the node of the DGX H100.
    "h200": dataclasses.replace(
        _H100, name="NVIDIA H200", device_memory_bytes=int(139.8 * _GIB), device_bandwidth=4.8e12
    ),
    # An eighth of a DGX B200 (data sheet): bf16 2,250 and fp8 4,500 dense, fp32 75 TFLOP/s, 8 TB/s, NVLink
    # 1.8 TB/s for both directions, eight ports of 400 Gbit/s, 2 TB, two Xeon 8570 of 56 cores, DDR5-5600.
    "b200": dataclasses.replace(
        _H100, name="NVIDIA B200", compute_capability=(10, 0), device_memory_bytes=int(178.3 * _GIB),
        fp32_flops=75e12, bf16_flops=2250e12, fp8_flops=4500e12, device_bandwidth=8e12,
        node_link_bandwidth=900e9, host_bandwidth=716e9,
    ),
}  # fmt: skip
"""Nodes of eight GPUs by the name of the GPU."""


_CORE_FLOPS, _CORE_BANDWIDTH, _GLOO_LATENCY, _LAUNCH = 80e9, 10e9, 100e-6, 5e-6
"""Rates of a core of a server's CPU: fp32 products and copies, assumed; `llama-patch doctor` measures
them."""


def preset(name: str, origin: str) -> Machine:
    """A preset by its name, in any case.

    Raises:
        ConfigError: there is none of this name.
    """
    if name.lower() not in PRESETS:
        hint = nearest(name.lower(), list(PRESETS))
        raise ConfigError(
            f"{origin}: got {name!r}{hint}, expected {', '.join(PRESETS)}, here, or a file of "
            "llama-patch doctor"
        )
    return PRESETS[name.lower()]


def this_machine(facts: MachineFacts, processes: int) -> Machine:
    """The machine of this program: a preset with its number of GPUs and memory, or its CPU.

    Args:
        facts: what was found.
        processes: that share the CPU, where there is no GPU.

    Raises:
        ConfigError: no preset is like its GPU.
    """
    if facts.cuda_devices:
        return _like_a_preset(facts)
    cores = facts.cpu_cores / processes
    bandwidth = cores * _CORE_BANDWIDTH
    return Machine(
        name="this machine's CPU", devices_per_node=processes, is_gpu=False, device_memory_bytes=0,
        fp32_flops=cores * _CORE_FLOPS, bf16_flops=cores * _CORE_FLOPS, device_bandwidth=bandwidth,
        node_link_bandwidth=bandwidth / 4, node_link_latency=_GLOO_LATENCY, network_bandwidth=1e9,
        network_latency=_GLOO_LATENCY, host_memory_bytes=max(1, facts.host_memory_bytes),
        host_cores=facts.cpu_cores, host_bandwidth=bandwidth * processes, host_link_bandwidth=bandwidth,
        launch_seconds=_LAUNCH, reached=MEASURED,
    )  # fmt: skip


def machines_of(config: RunConfig, facts: MachineFacts) -> Machine | None:
    """The machines of a run that starts on this one, all like it.
    Returns:
        None if no preset is like its GPU.
    """
    parallel = config.parallel
    try:
        machine = this_machine(facts, parallel.nproc_per_node)
    except ConfigError:
        return None
    return dataclasses.replace(machine, nodes=parallel.nnodes, devices_per_node=parallel.nproc_per_node)


def _like_a_preset(facts: MachineFacts) -> Machine:
    words = facts.cuda_name.upper().replace("-", " ").split()
    found = [
        machine
        for name, machine in PRESETS.items()
        if name.upper() in words and machine.bf16_flops == peak_flops(facts.cuda_name)
    ]
    if not found:
        raise ConfigError(
            f"--machine here: got a {facts.cuda_name}, whose rates are not known; expected one of "
            f"{', '.join(PRESETS)}, or a file of llama-patch doctor"
        )
    return dataclasses.replace(
        found[0],
        name=facts.cuda_name,
        devices_per_node=facts.cuda_devices,
        device_memory_bytes=facts.cuda_memory_bytes,
        host_memory_bytes=facts.host_memory_bytes or found[0].host_memory_bytes,
        host_cores=facts.cpu_cores,
    )


def read_machine(file: str) -> Machine:
    """A machine from a YAML or JSON file: its fields, or a report of the doctor with them at `machine`.

    A file may begin with a preset, `like: h100`, and change some of its fields.

    Raises:
        ConfigError: it cannot be read, or a field is wrong.
    """
    origin = f"--machine {file}"
    try:
        values = parse_yaml(read_text(Path(file)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{origin}: cannot be read: {error}") from error
    values = dict(mapping(values, origin))
    values = dict(mapping(values.get("machine", values), origin))
    if (like := values.pop("like", None)) is not None:
        base = preset(str(like), origin).to_json()
        reached = {**base["reached"], **mapping(values.get("reached", {}), f"{origin}: reached")}
        values = {**base, **values, "reached": reached}
    return Machine.from_json(values, origin)
