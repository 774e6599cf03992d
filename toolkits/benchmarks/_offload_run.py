"""Runs one contender of `offload` in its own process, so that memory peaks and pinned memory are its own.

python -m toolkits.benchmarks._offload_run '{"contender": "ours: auto", ...}'    the fields of Task, as JSON
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from patch.config.schema import ModelConfig, RunConfig
from toolkits.benchmarks._child import StepsTask
from toolkits.benchmarks._run_config import run_config

FRACTIONS = (0.25, 0.5, 1.0)
NO_OFFLOAD = "no offload"
CONTENDERS = (
    *(f"{side}: {NO_OFFLOAD}" for side in ("ours", "upstream")),
    *(f"{side}: {fraction:g}" for fraction in FRACTIONS for side in ("ours", "upstream")),
    "ours: auto",
)
"""A number is the share of states on the host, with our `static` or upstream's HybridDeviceOptimizer."""
_WARM_UP_STEPS = 5
"""Untimed steps, in which kernels are built and `auto` fills the device."""


class Task(StepsTask):
    """The work of the process."""


def offload_run(layers: int, sequence: int) -> RunConfig:
    """A model with some of LLaMA-3.1 8B's layers: bf16 weights, fp32 gradients, one sequence per step."""
    model = ModelConfig(
        num_layers=layers, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
        num_query_groups=8, kv_channels=128, vocab_size=128256, seq_length=sequence,
        max_position_embeddings=131072, rotary_base=500000.0, use_rope_scaling=True,
        untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    return run_config(model, optimizer={"lr": 1e-5, "min_lr": 1e-5}, precision="bf16")


def with_offload(config: RunConfig, contender: str) -> RunConfig:
    """The run with the offload flags of one of our contenders."""
    share = contender.split(": ")[1]
    if share == NO_OFFLOAD:
        return config
    changes: dict[str, Any] = {"optimizer_offload_policy": "auto"}
    if share != "auto":
        changes = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": float(share)}
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **changes))


def measure(config: RunConfig, contender: str, steps: int) -> dict[str, float]:
    """Measure one contender in a job of one process.

    A timed step includes the end of the previous update, but not the end of its own.

    Args:
        config: the run without offload.
        contender: one of CONTENDERS.
        steps: number of timed steps.
    Returns:
        seconds per step, memory peaks in GiB, and the last loss.
    """
    import torch
    import torch.distributed as dist

    from patch import compat
    from patch.device import DeviceContext
    from patch.distributed.groups import initialize
    from toolkits.benchmarks._contenders import OurTrainer, SameBatches, now
    from toolkits.benchmarks._upstream import Overlap, UpstreamTrainer

    context = DeviceContext.select(0)
    compat.apply(cuda=context.is_cuda)
    if not dist.is_initialized():
        dist.init_process_group(context.backend, store=dist.HashStore(), rank=0, world_size=1)
    groups = initialize(config, context)
    reader = SameBatches(config, 0)
    side, share = contender.split(": ")
    trainer: OurTrainer | UpstreamTrainer
    if side == "ours":
        trainer = OurTrainer(with_offload(config, contender), groups, context.device, reader)
    else:
        offload = 0.0 if share == NO_OFFLOAD else float(share)
        trainer = UpstreamTrainer(config, groups, context.device, reader.batches, Overlap(offload=offload))
    for _ in range(_WARM_UP_STEPS):
        trainer.step()
    begin = now(context.device)
    for _ in range(steps):
        loss = trainer.step()
    seconds = (now(context.device) - begin) / steps
    trainer.settle()
    measured = {"seconds": seconds, "loss": loss, "host_gib": _host_peak()}
    if context.is_cuda:
        measured["gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if isinstance(trainer, OurTrainer):
        report = trainer.run.optimizer.report()
        measured["fraction"] = report.offload_fraction
        # `auto` resets torch's peak counter in each step.
        measured["gpu_gib"] = max(measured.get("gpu_gib", 0.0), report.largest_peak / 2**30)
    return measured


def _host_peak() -> float:
    """The peak of this process's resident memory, in GiB."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    return float("nan")


if __name__ == "__main__":
    task = Task(**json.loads(sys.argv[1]))
    print(json.dumps(measure(offload_run(task.layers, task.sequence), task.contender, task.steps)))
