"""How fast memory, the Adam kernel, products, and copies to and from a GPU are; a second or two each."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from patch.optimizer.kernels import AdamScalars, AdamStates, UpdateItem, adam_kernel
from patch.plan.flops import peak_flops
from patch.plan.timing.step_time import UPDATE_BYTES
from toolkits.doctor.check import Finding, Settings, graded

_COPY_BYTES = 256 << 20
_ADAM_NUMEL = 1 << 24
_BUDGET_S = 0.5
_CPU_MATRIX, _GPU_MATRIX = 1024, 8192
_MIN_SHARE_OF_PEAK = 0.5
_SLOW_IN_16_BITS = 0.3
"""Share of the speed in fp32."""
_NUM_STARTS = 1000
_MIN_PCIE = 10e9


def best_seconds(call: Callable[[], object], budget_s: float = _BUDGET_S) -> float:
    """The shortest of several calls; at least three, more while time is left.

    Args:
        call: what is timed, to its end.
        budget_s: the time for all of them.
    """
    call()
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure_host(settings: Settings) -> Iterator[Finding]:
    """Copies, the optimizer's kernel and products on all cores that this process may use."""
    torch.set_num_threads(settings.machine.cpu_cores)
    yield _copies()
    yield _adam()
    flops = {kind: _products(dtype) for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
    what = " and ".join(f"{speed / 1e9:.0f} GFLOP/s in {kind}" for kind, speed in flops.items())
    cure = "runs on this CPU take --precision fp32 (position 9): bf16 is emulated"
    yield graded("products", what, flops["bf16"] < _SLOW_IN_16_BITS * flops["fp32"], cure, **flops)
    yield Finding("start of an operation", "ok", f"{(launch := _launch_seconds('cpu')) * 1e6:.1f} us",
                  data={"seconds": launch})  # fmt: skip


def _copies() -> Finding:
    """Copies from memory to memory."""
    source = torch.ones(_COPY_BYTES // 4)
    target = torch.empty_like(source)
    speed = 2 * _COPY_BYTES / best_seconds(lambda: target.copy_(source))
    what = f"{speed / 1e9:.1f} GB/s, read and written"
    return Finding("memory copies", "ok", what, data={"bytes_per_s": speed})


def _products(dtype: torch.dtype) -> float:
    """FLOP/s of a square product on the CPU."""
    matrix = torch.ones(_CPU_MATRIX, _CPU_MATRIX, dtype=dtype)
    out = torch.empty_like(matrix)
    return 2 * _CPU_MATRIX**3 / best_seconds(lambda: torch.mm(matrix, matrix, out=out))


def _launch_seconds(device: str) -> float:
    """Time of the host to start one of many small operations."""
    one = torch.ones(1, device=device)

    def start_many() -> None:
        for _ in range(_NUM_STARTS):
            one.add_(1.0)

    return best_seconds(start_many, 0.1) / _NUM_STARTS


def _adam() -> Finding:
    """The kernel that updates what is offloaded, or all on a CPU."""
    grad, master, first, second = (torch.full((_ADAM_NUMEL,), 0.5) for _ in range(4))
    scalars = AdamScalars(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)
    item = UpdateItem(grad, AdamStates(master, first, second), scalars)
    kernel = adam_kernel(torch.device("cpu"))
    seconds = best_seconds(lambda: kernel.update([item]))
    speed, billion_s = _ADAM_NUMEL * UPDATE_BYTES["fp32"] / seconds, seconds * 1e9 / _ADAM_NUMEL
    what = f"{speed / 1e9:.1f} GB/s, {billion_s:.2f} s for a billion parameters ({type(kernel).__name__})"
    return Finding("Adam on the host", "ok", what, data={"bytes_per_s": speed, "s_per_billion": billion_s})


def measure_gpus(settings: Settings) -> Iterator[Finding]:
    """Each GPU's copies from and to pinned memory, its memory, its products. No GPU has run this yet."""
    for index in range(settings.machine.cuda_devices):
        device = torch.device("cuda", index)
        yield _pinned_copies(index, device)
        yield _device_memory(index, device)
        yield _device_products(index, device)
        launch = _launch_seconds(f"cuda:{index}")
        yield Finding(f"GPU {index} start", "ok", f"{launch * 1e6:.1f} us a kernel", data={"seconds": launch})


def _timed_on(device: torch.device, call: Callable[[], object]) -> float:
    def to_the_end() -> None:
        call()
        torch.cuda.synchronize(device)

    return best_seconds(to_the_end)


def _pinned_copies(index: int, device: torch.device) -> Finding:
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty_like(host, device=device)
    up = _COPY_BYTES / _timed_on(device, lambda: on_device.copy_(host, non_blocking=True))
    down = _COPY_BYTES / _timed_on(device, lambda: host.copy_(on_device, non_blocking=True))
    cure = "look at the PCIe lanes and the NUMA node of this GPU: offload copies at this speed"
    what = f"{up / 1e9:.1f} GB/s to it, {down / 1e9:.1f} GB/s back"
    data = {"to_device_bytes_per_s": up, "to_host_bytes_per_s": down}
    return graded(f"GPU {index} pinned copies", what, min(up, down) < _MIN_PCIE, cure, **data)


def _device_memory(index: int, device: torch.device) -> Finding:
    source = torch.empty(4 * _COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    speed = 2 * source.nbytes / _timed_on(device, lambda: target.copy_(source))
    what = f"{speed / 1e9:.0f} GB/s, read and written"
    return Finding(f"GPU {index} memory", "ok", what, data={"bytes_per_s": speed})


def _device_products(index: int, device: torch.device) -> Finding:
    matrix = torch.randn(_GPU_MATRIX, _GPU_MATRIX, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(matrix)
    flops = 2 * _GPU_MATRIX**3 / _timed_on(device, lambda: torch.mm(matrix, matrix, out=out))
    peak = peak_flops(torch.cuda.get_device_name(device))
    share = f", {flops / peak:.0%} of the peak" if peak else ""
    is_slow = peak is not None and flops < _MIN_SHARE_OF_PEAK * peak
    cure = "another process on this GPU, a power cap or heat: see nvidia-smi -q -d PERFORMANCE"
    what = f"{flops / 1e12:.0f} TFLOP/s in bf16{share}"
    return graded(f"GPU {index} products", what, is_slow, cure, flops_per_s=flops)  # fmt: skip
