"""One rank of `long_context`: the memory of a first training step, for several lengths of the sequence.

python -m toolkits.benchmarks._long_context_rank '{"rank": 0, ...}'        the fields of Task, as JSON
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch import compat
from patch.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from patch.data.samples import cut_batch
from patch.device import DeviceContext
from patch.distributed.groups import initialize, shutdown
from patch.distributed.zigzag import Zigzag
from toolkits.benchmarks._allocated import peak_bytes
from toolkits.benchmarks._contenders import OurTrainer, SameBatches

SHAPE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 160, "num_attention_heads": 1,
    "num_query_groups": 1, "kv_channels": 32, "vocab_size": 512,
}  # fmt: skip
"""One small head, because attention to 131072 tokens is most of the time."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one rank."""

    rank: int
    store: str
    """File of the FileStore through which the ranks find each other."""
    output: str
    """File for the results."""
    tokens: list[int]
    """Of the one sequence of a step, in each run."""
    cp_size: int

    def to_json(self) -> str:
        """The argument of the process."""
        return json.dumps(asdict(self))


def run_config(tokens: int, cp_size: int) -> RunConfig:
    """A run of one sequence a step, over a ring."""
    return RunConfig(
        model=ModelConfig(
            **SHAPE, seq_length=tokens, max_position_embeddings=tokens, rotary_base=500000.0,
            untie_embeddings_and_output_weights=True,
        ),
        parallel=ParallelConfig(
            nproc_per_node=cp_size, context_parallel_size=cp_size, cp_comm_type="p2p" if cp_size > 1 else None
        ),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1, precision="fp32"),
        optimizer=OptimizerConfig(lr=1e-4, min_lr=1e-4),
        data=DataConfig(train_data_path="none", max_padding_length=tokens),
        checkpoint=CheckpointConfig(output_path="none"),
    )  # fmt: skip


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

    peak = torch.tensor(peak_bytes(step, device))
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    return int(peak)


def run_rank(task: Task) -> list[int]:
    """See `step_peak_bytes`; of each length, equal on all ranks."""
    torch.set_num_threads(1)
    compat.apply(cuda=False)
    store = dist.FileStore(task.store, task.cp_size)
    dist.init_process_group("gloo", store=store, rank=task.rank, world_size=task.cp_size)
    configs = [run_config(tokens, task.cp_size) for tokens in task.tokens]
    groups = initialize(configs[0], DeviceContext(torch.device("cpu"), "gloo"))
    found = [step_peak_bytes(config, groups) for config in configs]
    dist.barrier()
    shutdown()
    return found


if __name__ == "__main__":
    given = Task(**json.loads(sys.argv[1]))
    measured = run_rank(given)
    if given.rank == 0:
        Path(given.output).write_text(json.dumps(measured), encoding="utf-8")
