"""Times the training step of one contender of `gpu_step` in its own process, and names its dearest kernels.

python -m toolkits.benchmarks._gpu_step_run '{"contender": "local bf16", ...}'    the fields of Task, as JSON
"""

from __future__ import annotations

import json
import sys
from typing import Any

from patch.config.choices import TransformerImpl
from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.plan.describe import memory_needed
from toolkits.benchmarks._child import StepsTask
from toolkits.benchmarks._run_config import llama, run_config

NUM_KERNELS = 10
"""Kernels in the list of the dearest."""
_WARM_UP_STEPS = 3
_NAME_LENGTH = 90
_MOST_LAYERS = 32
CONTENDERS: dict[str, tuple[TransformerImpl, dict[str, Any]]] = {
    "local bf16": ("local", {"precision": "bf16"}),
    "TE bf16": ("transformer_engine", {"precision": "bf16"}),
    "local fp8": ("local", {"precision": "fp8", "fp8_recipe": "tensorwise"}),
    "TE fp8": ("transformer_engine", {"precision": "fp8", "fp8_recipe": "tensorwise"}),
    "TE fp8 delayed": ("transformer_engine", {"precision": "fp8", "fp8_recipe": "delayed"}),
}
"""Name -> whose layers, and fields of the training. The weights' type changes nothing about memory."""


class Task(StepsTask):
    """The work of the process."""


def step_run(contender: str, layers: int, sequence: int) -> RunConfig:
    """Layers of LLaMA-3.1 8B with its embedding and output layer; one sequence a step, no offload."""
    impl, training = CONTENDERS[contender]
    model = llama(
        sequence, num_layers=layers, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
        num_query_groups=8, kv_channels=128, vocab_size=128256, transformer_impl=impl,
    )  # fmt: skip
    return run_config(model, optimizer={"lr": 1e-5, "min_lr": 1e-5}, **training)


def layers_that_fit(machine: MachineFacts, sequence: int, share: float) -> int:
    """As many layers as the plan puts into this share of the GPU's memory; at least 1.

    Args:
        machine: the GPU.
        sequence: tokens of a sequence.
        share: of its memory; the rest is the CUDA context, the libraries' workspaces and fragmentation.
    """
    for layers in range(_MOST_LAYERS, 1, -1):
        needed, *_ = memory_needed(step_run("local bf16", layers, sequence), machine)
        if needed <= share * machine.cuda_memory_bytes:
            return layers
    return 1


def measure(config: RunConfig, steps: int) -> dict[str, Any]:
    """Measure a run in a job of one process, on the GPU if there is one.

    Args:
        config: the run.
        steps: number of timed steps.
    Returns:
        seconds a step, peak memory in GiB, the last loss, and the dearest kernels of one more step.
    """
    import torch
    import torch.distributed as dist

    from patch import compat
    from patch.device import DeviceContext
    from patch.distributed.groups import initialize
    from toolkits.benchmarks._contenders import OurTrainer, SameBatches, now

    context = DeviceContext.select(0)
    compat.apply(cuda=context.is_cuda)
    if not dist.is_initialized():
        dist.init_process_group(context.backend, store=dist.HashStore(), rank=0, world_size=1)
    groups = initialize(config, context)
    trainer = OurTrainer(config, groups, context.device, SameBatches(config, 0))
    for _ in range(_WARM_UP_STEPS):
        trainer.step()
    begin = now(context.device)
    for _ in range(steps):
        loss = trainer.step()
    measured: dict[str, Any] = {"seconds": (now(context.device) - begin) / steps, "loss": loss}
    if context.is_cuda:
        measured["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        measured["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    measured["kernels"] = dearest_kernels(trainer.step, context.device)
    trainer.settle()
    return measured


def dearest_kernels(step: Any, device: Any) -> list[tuple[str, int, float, float]]:
    """The kernels that take most of a step, with calls, milliseconds, and their share of all kernels' time.

    On a CPU they are torch's operators.

    Args:
        step: what is profiled, once.
        device: where it runs.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    is_cuda = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if is_cuda else [ProfilerActivity.CPU]
    with profile(activities=activities) as profiler:
        step()
        if is_cuda:
            torch.cuda.synchronize(device)
    kind = DeviceType.CUDA if is_cuda else DeviceType.CPU
    found = [event for event in profiler.key_averages() if event.device_type == kind]
    times = {
        event.key: event.self_device_time_total if is_cuda else event.self_cpu_time_total for event in found
    }
    total = sum(times.values()) or 1.0
    found.sort(key=lambda event: -times[event.key])
    return [
        (event.key[:_NAME_LENGTH], event.count, times[event.key] / 1e3, times[event.key] / total)
        for event in found[:NUM_KERNELS]
    ]


if __name__ == "__main__":
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps(measure(step_run(task.contender, task.layers, task.sequence), task.steps)))
