"""The machine part of the report: what was measured, as the machine that `toolkits.plan` plans for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from patch.plan.flops import peak_flops
from patch.plan.timing.machine import MEASURED, Machine, Reached
from toolkits.doctor.check import Finding, Settings

Found = Mapping[str, Mapping[str, Any]]
"""The numbers of each finding, by its name."""
_FP8_CAPABILITY = (8, 9)


def machine_part(report: Mapping[str, Sequence[Finding]], settings: Settings) -> dict[str, Any]:
    """One node of equal devices; empty if a measurement that it needs is not there.

    Without GPUs a device is one of --nproc processes, which share the products and memory of the host. The
    network between machines cannot be measured on one: it is taken to be the fastest interface, divided
    between the devices, or the links inside the machine if the kernel knows no speed.

    Args:
        report: the findings of each check.
        settings: what they are about.
    """
    found = {finding.name: finding.data for findings in report.values() for finding in findings}
    try:
        machine = _of_gpus(found, settings) if settings.has_gpus else _of_cpus(found, settings)
    except KeyError:
        return {}
    return machine.to_json()


def _of_cpus(found: Found, settings: Settings) -> Machine:
    processes = settings.num_processes
    copies, products = found["memory copies"]["bytes_per_s"] / processes, found["products"]
    return Machine(
        name="CPU",
        is_gpu=False,
        devices_per_node=processes,
        device_memory_bytes=0,
        fp32_flops=products["fp32"] / processes,
        bf16_flops=products["bf16"] / processes,
        device_bandwidth=copies,
        host_link_bandwidth=copies,
        launch_seconds=found["start of an operation"]["seconds"],
        reached=MEASURED,
        **_common(found, settings, processes),
    )


def _of_gpus(found: Found, settings: Settings) -> Machine:
    """The peak of products is the data sheet's if it is known; `gemm` is the share that was measured."""
    machine, measured = settings.machine, found["GPU 0 products"]["flops_per_s"]
    peak = peak_flops(machine.cuda_name) or measured
    has_fp8 = machine.compute_capability >= _FP8_CAPABILITY
    copies = found["GPU 0 pinned copies"]
    return Machine(
        name=machine.cuda_name,
        devices_per_node=machine.cuda_devices,
        compute_capability=machine.compute_capability,
        device_memory_bytes=machine.cuda_memory_bytes,
        fp32_flops=peak / 16,  # as of an H100, without TF32
        bf16_flops=peak,
        fp8_flops=2 * peak if has_fp8 else 0.0,
        device_bandwidth=found["GPU 0 memory"]["bytes_per_s"],
        host_link_bandwidth=min(copies["to_device_bytes_per_s"], copies["to_host_bytes_per_s"]),
        launch_seconds=found["GPU 0 start"]["seconds"],
        reached=Reached(
            gemm=measured / peak, device_bandwidth=1.0, node_link=1.0, host_link=1.0, host_bandwidth=1.0
        ),
        **_common(found, settings, machine.cuda_devices),
    )


def _common(found: Found, settings: Settings, devices: int) -> dict[str, Any]:
    """What GPUs and CPUs have in common: links and the host."""
    host = found["Adam on the host"]["bytes_per_s"]
    if devices > 1:
        # The slower of the two collectives that ZeRO sends.
        link = min(found[name]["bus_bytes_per_s"] for name in ("reduce-scatter", "all-gather"))
        latency = found["latency"]["seconds"]
    else:  # nobody to talk to
        link, latency = host, 1e-5
    fastest = max(found["interfaces"]["mbit_per_s"].values(), default=0) * 1e6 / 8
    return {
        "node_link_bandwidth": link,
        "node_link_latency": latency,
        "network_bandwidth": fastest / devices or link,
        "network_latency": latency,
        "host_memory_bytes": settings.machine.host_memory_bytes,
        "host_cores": settings.machine.cpu_cores,
        "host_bandwidth": host,
    }
