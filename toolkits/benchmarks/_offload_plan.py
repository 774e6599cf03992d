"""Predicts a step of optimizer offload: what travels, what the host computes, and what waits for what.

A simulation of `patch.optimizer.host_update` by arithmetic: four queues (device, copies down, host, copies
up), equal chunks, whose gradients become final one after the other, no contention but for the queues. It is a
prediction; what this machine measures is the host's kernel.

bf16 weights with split masters and fp32 gradients: for each number 4 + 2 bytes go down, 2 go up, and the
kernel reads and writes 28 bytes. A speculative update writes its results elsewhere and takes longer.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace

import torch

from patch.optimizer.kernels import AdamStates, UpdateItem
from patch.optimizer.kernels.build import BuildError
from patch.optimizer.kernels.cpp_adam import CppAdam
from patch.plan import flops_per_step
from toolkits.benchmarks._adam_contenders import SCALARS
from toolkits.benchmarks._offload_run import FRACTIONS, offload_run

DOWN_GRADIENT, DOWN_WEIGHT, UP, KERNEL = 4, 2, 2, 28
"""Bytes for each number."""
STATE, SHADOW, INPUT = 10, 12, 6
"""Bytes of host memory for each number: states, a second set with the new weight, gradient and weight."""
_SHADOW_FACTOR = 1.36
"""Time of an update into a shadow over that of one in place (RESULTS.md, adam_cpu)."""
_SPECULATIVE_SHARE, _SHADOW_MEMORY_SHARE, _INPUT_MEMORY_SHARE, _NUM_ALWAYS = 0.5, 0.5, 0.25, 2
_INPUT_SHARE = 0.35
"""As in patch/optimizer/host_buffers.py."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One process with one GPU; seconds, bytes, bytes a second."""

    parameters: float
    fraction: float
    """Share of the states on the host."""
    forward: float
    backward: float
    link: float
    """Bytes a second between host and device, each way."""
    host: float
    """Bytes a second that the kernel reads and writes."""
    host_memory: float
    chunks: int = 128
    """Of all states."""
    down: float = DOWN_GRADIENT + DOWN_WEIGHT
    """Bytes for each number that travel down."""
    input_share: float = _INPUT_SHARE
    """The largest share of the host's chunks that has input buffers."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Of a step with nothing clipped, after many others; seconds."""

    down: float
    up: float
    """The copies alone."""
    kernel: float
    """All updates, one after the other, in place."""
    speculative: float
    """Share of the host's chunks that is updated while backward runs."""
    first_weight: float
    """From the end of backward until the weights that the next forward needs first are there."""
    exposed: float
    """What a step takes beyond forward and backward."""


def predict(s: Setting) -> Prediction:
    """Simulate a step; see the head of the file."""
    size, count = s.parameters / s.chunks, round(s.fraction * s.chunks)
    down, up, update = size * s.down / s.link, size * UP / s.link, size * KERNEL / s.host
    spare = max(0.0, s.host_memory - STATE * size * count)
    most = _NUM_ALWAYS + int(_INPUT_MEMORY_SHARE * spare / (INPUT * size))
    buffers = min(max(_NUM_ALWAYS, int(s.input_share * count)), most)
    shadows = min(int(_SPECULATIVE_SHARE * count), int(_SHADOW_MEMORY_SHARE * spare / (SHADOW * size)))
    end = s.forward + s.backward
    # While backward runs: gradients go down as they become final, the first chunks are updated into shadows.
    arrived: list[float] = []
    updated: list[float] = []
    for chunk in range(count):
        final = s.forward + s.backward * (chunk + 1) / s.chunks
        if chunk >= buffers and chunk - buffers >= len(updated):
            break  # no buffer is released before the norm is known
        released = updated[chunk - buffers] if chunk >= buffers else 0.0
        if released > end:
            break
        arrived.append(max(arrived[-1] if arrived else 0.0, final, released) + down)
        begin = max(updated[-1] if updated else 0.0, arrived[-1])
        if chunk < shadows and len(updated) == chunk and begin < end:
            updated.append(begin + update * _SHADOW_FACTOR)
    speculated = len(updated)
    ready = _after_norm(s, count, speculated, arrived, updated, (down, up, update), buffers)
    return Prediction(
        down=down * count, up=up * count, kernel=update * count,
        speculative=speculated / count if count else 0.0,
        first_weight=max(0.0, ready[count - 1] - end) if count else 0.0,
        exposed=max(0.0, _next_forward(s, ready, end) - s.forward),
    )  # fmt: skip


def _after_norm(
    s: Setting,
    count: int,
    speculated: int,
    arrived: list[float],
    updated: list[float],
    times: tuple[float, float, float],
    num_buffers: int,
) -> list[float]:
    """When each chunk's new weights are on the device: in the order of need, the last chunk first.

    Args:
        s: the setting.
        count: chunks on the host.
        speculated: how many of the first were updated early.
        arrived: when the inputs of the first ones are on the host.
        updated: when the early updates have ended.
        times: of a copy down, a copy up, and an update in place, of one chunk.
        num_buffers: for inputs.
    """
    down, up, update = times
    end = s.forward + s.backward
    ready = [0.0] * count
    host = max(end, updated[-1] if updated else 0.0)
    link_down = max(end, arrived[-1] if arrived else 0.0)
    link_up = end
    late: list[float] = []
    for chunk in reversed(range(count)):
        if chunk >= speculated:
            if chunk < len(arrived):
                inputs = arrived[chunk]
            else:  # buffers go round; that one is taken from a chunk with a copy, made again, is left out
                released = late[-num_buffers] if len(late) >= num_buffers else end
                link_down = inputs = max(link_down, released) + down
            host = max(host, inputs) + update
            late.append(host)
        link_up = ready[chunk] = max(link_up, host) + up
    return ready


def _next_forward(s: Setting, ready: list[float], end: float) -> float:
    """Seconds of the next forward, which waits for each chunk's weights; the last chunk comes first."""
    now, part = end, s.forward / s.chunks
    for chunk in reversed(range(s.chunks)):
        if chunk < len(ready):
            now = max(now, ready[chunk])
        now += part
    return now - end


def kernel_bandwidth(threads: int, numel: int = 1 << 24, repeats: int = 9) -> float:
    """Bytes a second of the host's kernel with split masters, measured.

    Args:
        threads: of an update.
        numel: numbers of an update.
        repeats: updates, of which the fastest counts: others had to share the machine.
    """
    kernel = CppAdam(threads)
    gradient, exp_avg, exp_avg_sq = (torch.full((numel,), value) for value in (1e-3, 1e-4, 1e-6))
    weight, low = torch.ones(numel, dtype=torch.bfloat16), torch.zeros(numel, dtype=torch.int16)
    item = UpdateItem(gradient, AdamStates(low, exp_avg, exp_avg_sq, weight), SCALARS)
    times = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        kernel.update([item])
        times.append(time.perf_counter() - begin)
    return KERNEL * numel / min(times[1:])


_PARAMETERS, _LAYERS, _SEQUENCE = 8_030_261_248, 32, 8192
_FLOPS = 0.45 * 989.5e12
"""FLOP/s that forward and backward are taken to reach: 45 % of an H100's or H200's dense bf16 peak."""
_LINK = 50e9
"""Of PCIe 5.0 with 16 lanes, each way, as pinned copies reach it."""
_HOST_MEMORY = 137e9
HOSTS = (110e9, 150e9, 300e9)
_THREADS = (8, 16)
_VARIANTS: dict[str, dict[str, float]] = {
    "as it is": {},
    "without the weight's way down": {"down": DOWN_GRADIENT},
    "bf16 gradients": {"down": DOWN_WEIGHT + 2},
    "512 GB of host memory": {"host_memory": 512e9},
    "512 GB, inputs of all chunks at once": {"host_memory": 512e9, "input_share": 1.0},
}


def setting(fraction: float, host: float, **changes: float) -> Setting:
    """LLaMA-3.1 8B with sequences of 8192 tokens on an H100 with PCIe 5.0 and 128 GiB of host memory.

    Args:
        fraction: share of the states on the host.
        host: bytes a second of the host's kernel.
        changes: other fields that differ.
    """
    seconds = flops_per_step(offload_run(_LAYERS, _SEQUENCE)).model / _FLOPS
    default = Setting(
        parameters=_PARAMETERS, fraction=fraction, forward=seconds / 3, backward=seconds * 2 / 3, link=_LINK,
        host=host, host_memory=_HOST_MEMORY,
    )  # fmt: skip
    return replace(default, **changes)  # type: ignore[arg-type]


def plan_text(measured: dict[int, float]) -> str:
    """The prediction as Markdown tables.

    Args:
        measured: bytes a second of this host's kernel by number of threads.
    """
    base = setting(1.0, HOSTS[0])
    lines = [
        "PREDICTION, not measured: LLaMA-3.1 8B, one sequence of 8192 tokens, one GPU at "
        f"{_FLOPS / 1e12:.0f} TFLOP/s", f"(forward {base.forward:.2f} s, backward {base.backward:.2f} s), "
        f"{_LINK / 1e9:.0f} GB/s each way, {_HOST_MEMORY / 1e9:.0f} GB of host memory; seconds", "",
        "| host | fraction | down | up | kernel | updated early | first weight | exposed | step / none |",
        "|" + " --- |" * 9,
    ]  # fmt: skip
    hosts = {f"{host / 1e9:.0f} GB/s": host for host in HOSTS}
    hosts |= {f"here, {threads} threads: {rate / 1e9:.0f}": rate for threads, rate in measured.items()}
    for name, host in hosts.items():
        for fraction in FRACTIONS:
            s = setting(fraction, host)
            p, compute = predict(s), s.forward + s.backward
            figures = " | ".join(f"{x:.2f}" for x in (p.down, p.up, p.kernel))
            lines.append(
                f"| {name} | {fraction:g} | {figures} | {p.speculative:.0%} | {p.first_weight:.2f} "
                f"| {p.exposed:.2f} | {1 + p.exposed / compute:.2f} |"
            )
    lines += ["", "Exposed seconds if something changed, at 150 GB/s:", ""]
    lines += ["| | " + " | ".join(f"{f:g}" for f in FRACTIONS) + " |", "|" + " --- |" * (1 + len(FRACTIONS))]
    for name, changes in _VARIANTS.items():
        exposed = (predict(setting(f, HOSTS[1], **changes)).exposed for f in FRACTIONS)
        lines.append(f"| {name} | " + " | ".join(f"{x:.2f}" for x in exposed) + " |")
    return "\n".join(lines) + "\n"


def measured_here() -> dict[int, float]:
    """Bytes a second of the kernel on 8 and on 16 cores, or on all there are; {} without a compiler."""
    cores = len(os.sched_getaffinity(0))
    try:
        return {threads: kernel_bandwidth(threads) for threads in sorted({min(cores, t) for t in _THREADS})}
    except BuildError:
        return {}


if __name__ == "__main__":
    print(plan_text(measured_here()))
