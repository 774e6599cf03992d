"""How fast memory, the Adam kernel, products and a GPU's copies are; and the machine to plan for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.benchmark import Timer as Stopwatch  # not a thread

from patch.config.choices import PRECISIONS
from patch.optimizer.kernels import AdamScalars, AdamStates, UpdateItem, adam_kernel
from patch.plan.flops import peak_flops
from patch.plan.timing.machine import MEASURED, Machine, Reached
from toolkits.doctor.check import Finding, Report, Settings, graded

_COPY_BYTES = 256 << 20
_ADAM_NUMEL = 1 << 24
_BUDGET_S = 0.5
"""Time for the calls of which the shortest counts."""
_CPU_MATRIX, _GPU_MATRIX = 1024, 8192
_MIN_SHARE_OF_PEAK = 0.5
_SLOW_IN_16_BITS = 0.3
"""Share of the speed in fp32."""
_MIN_PCIE = 10e9
_FP8_CAPABILITY = (8, 9)


def seconds_of(call: Callable[[], object]) -> float:
    """The shortest time of a call, to the end of what it starts on the current GPU."""
    timer = Stopwatch("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=_BUDGET_S).times)


def measure_host(settings: Settings) -> Iterator[Finding]:
    """Copies, the optimizer's kernel and products on all cores that this process may use."""
    torch.set_num_threads(settings.machine.cpu_cores)
    yield _copies("memory copies", "cpu", _COPY_BYTES)
    grad, master, first, second = (torch.full((_ADAM_NUMEL,), 0.5) for _ in range(4))
    scalars = AdamScalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    item = UpdateItem(grad, AdamStates(master, first, second), scalars)
    kernel = adam_kernel(torch.device("cpu"))
    seconds = seconds_of(lambda: kernel.update([item]))
    speed, billion_s = _ADAM_NUMEL * PRECISIONS["fp32"].update_bytes / seconds, seconds * 1e9 / _ADAM_NUMEL
    what = f"{speed / 1e9:.1f} GB/s, {billion_s:.2f} s for a billion parameters ({type(kernel).__name__})"
    yield Finding("Adam on the host", "ok", what, data={"bytes_per_s": speed})
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    flops = {kind: _products("cpu", _CPU_MATRIX, dtype) for kind, dtype in kinds.items()}
    what = " and ".join(f"{speed / 1e9:.0f} GFLOP/s in {kind}" for kind, speed in flops.items())
    cure = "runs on this CPU take --precision fp32 (position 9): bf16 is emulated"
    yield graded("products", what, flops["bf16"] < _SLOW_IN_16_BITS * flops["fp32"], cure, **flops)
    yield _start("start of an operation", "cpu")


def measure_gpus(settings: Settings) -> Iterator[Finding]:
    """Each GPU's copies from and to pinned memory, its memory, its products."""
    for index in range(settings.machine.cuda_devices):
        with torch.cuda.device(index):
            yield from _measure_gpu(f"GPU {index}")


def _measure_gpu(name: str) -> Iterator[Finding]:
    """The findings of the current GPU."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(host, device="cuda")
    up = _COPY_BYTES / seconds_of(lambda: on_device.copy_(host, non_blocking=True))
    down = _COPY_BYTES / seconds_of(lambda: host.copy_(on_device, non_blocking=True))
    what = f"{up / 1e9:.1f} GB/s to it, {down / 1e9:.1f} GB/s back"
    cure = "look at the PCIe lanes and the NUMA node of this GPU: offload copies at this speed"
    data = {"to_device_bytes_per_s": up, "to_host_bytes_per_s": down}
    yield graded(f"{name} pinned copies", what, min(up, down) < _MIN_PCIE, cure, **data)
    yield _copies(f"{name} memory", "cuda", 4 * _COPY_BYTES)
    flops, peak = _products("cuda", _GPU_MATRIX, torch.bfloat16), peak_flops(torch.cuda.get_device_name())
    what = f"{flops / 1e12:.0f} TFLOP/s in bf16" + (f", {flops / peak:.0%} of the peak" if peak else "")
    cure = "another process on this GPU, a power cap or heat: see nvidia-smi -q -d PERFORMANCE"
    yield graded(f"{name} products", what, flops < _MIN_SHARE_OF_PEAK * (peak or 0), cure, flops_per_s=flops)
    yield _start(f"{name} start", "cuda")


def _copies(name: str, device: str, num_bytes: int) -> Finding:
    """Copies within a memory, read and written."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    speed = 2 * num_bytes / seconds_of(lambda: target.copy_(source))
    return Finding(name, "ok", f"{speed / 1e9:.1f} GB/s, read and written", data={"bytes_per_s": speed})


def _products(device: str, size: int, dtype: torch.dtype) -> float:
    """FLOP/s of a square product."""
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    out = torch.empty_like(matrix)
    return 2 * size**3 / seconds_of(lambda: torch.mm(matrix, matrix, out=out))


def _start(name: str, device: str) -> Finding:
    """Time of the host to start one of many small operations."""
    one = torch.ones(1, device=device)
    seconds = seconds_of(lambda: one.add_(1.0))
    return Finding(name, "ok", f"{seconds * 1e6:.1f} us", data={"seconds": seconds})


def machine_part(report: Report, settings: Settings) -> dict[str, Any]:
    """The machine that `toolkits.plan` plans for: one node of equal devices, with their measured rates.

    Without GPUs a device is one of --nproc processes, which share the products and memory of the host. The
    network between machines cannot be measured on one: it is taken to be the fastest interface, divided
    between the devices, or the links inside the machine if the kernel knows no speed.

    Args:
        report: the findings of each check.
        settings: what they are about.

    Returns:
        Its fields; none if a measurement that it needs is not there.
    """
    found = {finding.name: finding.data for findings in report.values() for finding in findings}
    devices = settings.machine.cuda_devices or settings.num_processes
    try:
        host = found["Adam on the host"]["bytes_per_s"]
        if devices > 1:
            # The slower of the two collectives that ZeRO sends.
            link = min(found[name]["bus_bytes_per_s"] for name in ("reduce-scatter", "all-gather"))
            latency = found["latency"]["seconds"]
        else:  # one process has no other to talk to
            link, latency = host, 1e-5
        fastest = max(found["interfaces"]["mbit_per_s"].values(), default=0) * 1e6 / 8
        return Machine(
            **(_gpu_rates(found, settings) if settings.has_gpus else _cpu_rates(found, devices)),
            devices_per_node=devices,
            node_link_bandwidth=link,
            node_link_latency=latency,
            network_bandwidth=fastest / devices or link,
            network_latency=latency,
            host_memory_bytes=settings.machine.host_memory_bytes,
            host_cores=settings.machine.cpu_cores,
            host_bandwidth=host,
        ).to_json()
    except KeyError:
        return {}


def _cpu_rates(found: Mapping[str, Mapping[str, Any]], processes: int) -> dict[str, Any]:
    """The rates of each of the processes on a CPU."""
    copies, products = found["memory copies"]["bytes_per_s"] / processes, found["products"]
    return {
        "name": "CPU", "is_gpu": False, "device_memory_bytes": 0,
        "fp32_flops": products["fp32"] / processes, "bf16_flops": products["bf16"] / processes,
        "device_bandwidth": copies, "host_link_bandwidth": copies,
        "launch_seconds": found["start of an operation"]["seconds"], "reached": MEASURED,
    }  # fmt: skip


def _gpu_rates(found: Mapping[str, Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """The peak of products is the data sheet's if it is known; `gemm` is the share that was measured."""
    machine, measured = settings.machine, found["GPU 0 products"]["flops_per_s"]
    peak, copies = peak_flops(machine.cuda_name) or measured, found["GPU 0 pinned copies"]
    ones = dict.fromkeys(("device_bandwidth", "node_link", "host_link", "host_bandwidth"), 1.0)
    return {
        "name": machine.cuda_name, "compute_capability": machine.compute_capability,
        "device_memory_bytes": machine.cuda_memory_bytes,
        "fp32_flops": peak / 16,  # as of an H100, without TF32
        "bf16_flops": peak, "fp8_flops": 2 * peak if machine.compute_capability >= _FP8_CAPABILITY else 0.0,
        "device_bandwidth": found["GPU 0 memory"]["bytes_per_s"], "host_link_bandwidth": min(copies.values()),
        "launch_seconds": found["GPU 0 start"]["seconds"], "reached": Reached(gemm=measured / peak, **ones),
    }  # fmt: skip
