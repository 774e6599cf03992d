"""One rank of `long_context`: the memory of a first training step, for several lengths of the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import ParallelConfig, RunConfig
from patch.data.samples import cut_batch
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from patch.distributed.zigzag import Zigzag
from toolkits.benchmarks._allocated import peak_bytes
from toolkits.benchmarks._contenders import OurTrainer, SameBatches
from toolkits.benchmarks._rank import run_as_rank
from toolkits.benchmarks._run_config import llama, run_config

SHAPE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 1,
    "num_query_groups": 1, "kv_channels": 32, "vocab_size": 512,
}  # fmt: skip
"""One small head, because attention to 131072 tokens is most of the time."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one rank."""

    tokens: list[int]
    """Tokens of the one sequence of a step, in each run."""


def ring_run(tokens: int, cp_size: int) -> RunConfig:
    """A run of one sequence a step, over a ring."""
    parallel = ParallelConfig(
        nproc_per_node=cp_size, context_parallel_size=cp_size, cp_comm_type="p2p" if cp_size > 1 else None
    )
    return run_config(llama(tokens, **SHAPE), parallel)


def step_peak_bytes(config: RunConfig, groups: ProcessGroupCollection) -> int:
    """The most bytes that the first step had allocated at once, beside weights and states, on the worst rank.

    Args:
        config: the run.
        groups: the process groups of this rank.
    """
    device, reader = torch.device("cpu"), SameBatches(config, 0)
    reader.batches = [cut_batch(batch, Zigzag.of(groups.cp)) for batch in reader.batches]
    trainer = OurTrainer(config, groups, device, reader)

    def step() -> None:
        trainer.step()
        trainer.run.optimizer.finish_param_sync()  # a profiler that stops meanwhile crashes gloo's threads

    peak = torch.tensor(peak_bytes(step, device))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def measure(task: Task, context: DeviceContext) -> list[int]:
    """See `step_peak_bytes`; of each length, equal on all ranks."""
    configs = [ring_run(tokens, dist.get_world_size()) for tokens in task.tokens]
    groups = initialize(configs[0], context)
    return [step_peak_bytes(config, groups) for config in configs]


if __name__ == "__main__":
    run_as_rank(Task, measure, on_cpu=True)
