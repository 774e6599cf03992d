"""Speed of memory, of the Adam kernel, of matrix products and of a GPU's copies; the machine for `plan`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.benchmark import Timer as Stopwatch  # the architecture tests take `Timer` for a thread

from patch.config.choices import MOMENT_BYTES, PRECISIONS
from patch.optimizer.kernels import adam_kernel
from patch.optimizer.kernels.spec import AdamScalars, AdamStates, UpdateItem
from patch.plan.flops import peak_flops
from patch.plan.timing.machine import MEASURED, Efficiency, Machine
from toolkits.doctor.check import Finding, Report, Settings, graded

_COPY_BYTES = 256 << 20
_ADAM_NUMEL = 1 << 24
_BUDGET_S = 0.5
"""Time for repeated calls, of which the shortest counts."""
_CPU_MATRIX, _GPU_MATRIX = 1024, 8192
_MIN_SHARE_OF_PEAK = 0.5
_SLOW_IN_16_BITS = 0.3
"""Share of the fp32 speed below which bf16 counts as emulated."""
_MIN_PCIE = 10e9
_FP8_CAPABILITY = (8, 9)


def seconds_of(call: Callable[[], object]) -> float:
    """Return the shortest time of a call, including its work on the current GPU."""
    timer = Stopwatch("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=_BUDGET_S).times)


def measure_host(settings: Settings) -> Iterator[Finding]:
    """Measure copies, the Adam kernel and matrix products on all cores that this process may use."""
    torch.set_num_threads(settings.machine.cpu_cores)
    yield _copies("memory copies", "cpu", _COPY_BYTES)
    grad, master, first, second = (torch.full((_ADAM_NUMEL,), 0.5) for _ in range(4))
    scalars = AdamScalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    item = UpdateItem(grad, AdamStates(master, first, second), scalars)
    kernel = adam_kernel(torch.device("cpu"))
    seconds = seconds_of(lambda: kernel.update([item]))
    num_bytes = PRECISIONS["fp32"].update_bytes + 4 * MOMENT_BYTES["fp32"]  # two moments, read and written
    speed, billion_s = _ADAM_NUMEL * num_bytes / seconds, seconds * 1e9 / _ADAM_NUMEL
    name = type(kernel).__name__
    what = f"{speed / 1e9:.1f} GB/s, {billion_s:.2f} s for a billion parameters ({name})"
    cure = "install g++ or clang++: a kernel in C++ is about 10 times faster"
    yield graded("Adam on the host", what, name == "NumpyAdam", cure, bytes_per_s=speed)
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16}
    flops = {kind: _products("cpu", _CPU_MATRIX, dtype) for kind, dtype in kinds.items()}
    what = " and ".join(f"{speed / 1e9:.0f} GFLOP/s in {kind}" for kind, speed in flops.items())
    cure = "runs on this CPU take --precision fp32 (position 9): bf16 is emulated"
    yield graded("products", what, flops["bf16"] < _SLOW_IN_16_BITS * flops["fp32"], cure, **flops)
    yield _start("start of an operation", "cpu")


def measure_gpus(settings: Settings) -> Iterator[Finding]:
    """Measure each GPU's copies from and to pinned memory, its memory, and its matrix products."""
    for index in range(settings.machine.cuda_devices):
        with torch.cuda.device(index):
            yield from _measure_gpu(f"GPU {index}")


def _measure_gpu(name: str) -> Iterator[Finding]:
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
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    speed = 2 * num_bytes / seconds_of(lambda: target.copy_(source))
    return Finding(name, "ok", f"{speed / 1e9:.1f} GB/s, read and written", data={"bytes_per_s": speed})


def _products(device: str, size: int, dtype: torch.dtype) -> float:
    matrix = torch.randn(size, size, dtype=dtype, device=device)
    out = torch.empty_like(matrix)
    return 2 * size**3 / seconds_of(lambda: torch.mm(matrix, matrix, out=out))


def _start(name: str, device: str) -> Finding:
    """Return the host's time to start a small operation."""
    one = torch.ones(1, device=device)
    seconds = seconds_of(lambda: one.add_(1.0))
    return Finding(name, "ok", f"{seconds * 1e6:.1f} us", data={"seconds": seconds})


def machine_part(report: Report, settings: Settings) -> dict[str, Any]:
    """Return the machine for `llama-patch plan`: one node of equal devices, with their measured rates.

    Without GPUs a device is one of --nproc processes, which share the host's compute and memory. The network
    between machines cannot be measured here. Its bandwidth is assumed to be that of the fastest interface,
    divided between the devices, or that of the links within the node if the kernel knows no speed.

    Returns:
        the fields, or {} if a measurement is missing.
    """
    found = {finding.name: finding.data for findings in report.values() for finding in findings}
    devices = settings.machine.cuda_devices or settings.num_processes
    try:
        host = found["Adam on the host"]["bytes_per_s"]
        if devices > 1:
            link, latency = found["reduce-scatter"]["bus_bytes_per_s"], found["latency"]["seconds"]
        else:  # a single process has no peer
            link, latency = host, 1e-5
        fastest = max(found["interfaces"]["mbit_per_s"].values(), default=0) * 1e6 / 8
        return Machine(
            **(_gpu_rates(found, settings) if settings.machine.cuda_devices else _cpu_rates(found, devices)),
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
    copies, products = found["memory copies"]["bytes_per_s"] / processes, found["products"]
    return {
        "name": "CPU", "is_gpu": False, "device_memory_bytes": 0,
        "fp32_flops": products["fp32"] / processes, "bf16_flops": products["bf16"] / processes,
        "device_bandwidth": copies, "host_link_bandwidth": copies,
        "launch_seconds": found["start of an operation"]["seconds"], "reached": MEASURED,
    }  # fmt: skip


def _gpu_rates(found: Mapping[str, Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """Return the rates of a GPU: the data sheet's peak if known, and as `gemm` the measured share of it."""
    machine, measured = settings.machine, found["GPU 0 products"]["flops_per_s"]
    peak, copies = peak_flops(machine.cuda_name) or measured, found["GPU 0 pinned copies"]
    ones = dict.fromkeys(("device_bandwidth", "node_link", "host_link", "host_bandwidth"), 1.0)
    return {
        "name": machine.cuda_name, "compute_capability": machine.compute_capability,
        "device_memory_bytes": machine.cuda_memory_bytes,
        "fp32_flops": peak / 16,  # as on an H100, without TF32
        "bf16_flops": peak, "fp8_flops": 2 * peak if machine.compute_capability >= _FP8_CAPABILITY else 0.0,
        "device_bandwidth": found["GPU 0 memory"]["bytes_per_s"], "host_link_bandwidth": min(copies.values()),
        "launch_seconds": found["GPU 0 start"]["seconds"],
        "reached": Efficiency(gemm=measured / peak, **ones),
    }  # fmt: skip
