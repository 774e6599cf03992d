"""One rank of the pipeline part of `parallel`: upstream's schedules over layers that wait, not compute."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ParallelConfig, RunConfig
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from patch.model import build_llama_model, initialize_weights
from patch.training.setup import Run, build_run_optimizer
from patch.training.step import run_schedule
from toolkits.benchmarks._contenders import SameBatches
from toolkits.benchmarks._rank import CPU, run_as_rank, time_on_ranks
from toolkits.benchmarks._run_config import llama, run_config
from toolkits.benchmarks._waiting_layers import WaitingLayer

_PROCESS_LAYERS = 2
"""Layers of a process: one stage of two layers, or two stages of one."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one rank."""

    cases: list[tuple[int, int, float]]
    """v, stages of a process; m, micro-batches; seconds of a micro-batch on a process, both ways."""
    rounds: int


class ComputeTimers:
    """Adds up what upstream's schedules call the compute of this process; takes the place of their timers."""

    def __init__(self) -> None:
        self.compute_s = 0.0
        self._name, self._begin = "", 0.0

    def __call__(self, name: str, log_level: int = 0) -> ComputeTimers:
        """Upstream's protocol: choose a timer; those of compute count, and never run at the same time."""
        self._name = name
        return self

    def start(self, barrier: bool = False) -> None:
        """Upstream's protocol."""
        if self._name.endswith("-compute"):
            self._begin = time.perf_counter()

    def stop(self) -> None:
        """Upstream's protocol."""
        if self._name.endswith("-compute"):
            self.compute_s += time.perf_counter() - self._begin


def pipeline_run(stages: int, virtual: int, micro_batches: int) -> RunConfig:
    """A model so small that all but the waiting takes next to no time."""
    model = llama(
        8, num_layers=_PROCESS_LAYERS * stages, hidden_size=8, ffn_hidden_size=8, num_attention_heads=1,
        num_query_groups=1, kv_channels=8, vocab_size=16,
    )  # fmt: skip
    parallel = ParallelConfig(
        nproc_per_node=stages, pipeline_model_parallel_size=stages,
        num_layers_per_virtual_pipeline_stage=_PROCESS_LAYERS // virtual if virtual > 1 else None,
    )  # fmt: skip
    return run_config(model, parallel, global_batch_size=micro_batches)


def build_waiting_run(config: RunConfig, groups: ProcessGroupCollection, wait_s: float) -> Run:
    """A run whose layers wait.

    Args:
        config: the run.
        groups: the process groups of the job.
        wait_s: seconds of a micro-batch in the layers of a process, forward and backward.
    """
    device = torch.device("cpu")
    stages = build_llama_model(config.model, groups, device, config.execution)
    initialize_weights(stages, config.model, config.training.seed)
    for layers in (stage.decoder.layers for stage in stages):
        for index in range(len(layers)):
            layers[index] = WaitingLayer(None, wait_s / _PROCESS_LAYERS)
    return Run(
        config=config, device=device, groups=groups, tokenizer=None,
        train_reader=SameBatches(config, 0), valid_readers={},  # type: ignore[arg-type]
        stages=stages, optimizer=build_run_optimizer(stages, config, groups), start_iteration=0,
    )  # fmt: skip


def time_step(run: Run) -> tuple[float, float]:
    """Forward and backward of a step: seconds of the slowest process, mean compute seconds of a process."""
    run.stages[0].config.timers = timers = ComputeTimers()
    run.optimizer.zero_grad(0.0)
    batches = run.train_reader.step(0)
    seconds = time_on_ranks(lambda: run_schedule(run, batches, tokens=1.0, loss_scale=1.0), CPU)
    compute = torch.tensor(timers.compute_s)
    dist.all_reduce(compute)
    return seconds, compute.item() / dist.get_world_size()


def measure(task: Task, context: DeviceContext) -> list[list[tuple[float, float]]]:
    """For each case: what `time_step` found in each round."""
    stages = dist.get_world_size()
    groups = initialize(pipeline_run(stages, 1, stages), context)
    runs = [
        build_waiting_run(pipeline_run(stages, virtual, micro_batches), groups, wait_s)
        for virtual, micro_batches, wait_s in task.cases
    ]
    rounds = [[time_step(run) for run in runs] for _ in range(task.rounds)]
    return [list(case) for case in zip(*rounds, strict=True)]


if __name__ == "__main__":
    run_as_rank(Task, measure, on_cpu=True)
