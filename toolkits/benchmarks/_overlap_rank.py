"""One rank of `overlap`: a process that builds all contenders and times them alternately.

python -m toolkits.benchmarks._overlap_rank '{"rank": 0, ...}'        the fields of Task, as JSON
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from patch.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from toolkits.benchmarks._overlap_figures import COMMUNICATION, COMPUTE

NUM_RANKS = 2

# The vocabulary is small, because the embedding has the last gradient and the first weight, so no compute can
# overlap with its communication. It has 2 % of the parameters, as in a large LLaMA.
_ON_CPU = ModelConfig(
    num_layers=16, hidden_size=192, ffn_hidden_size=512, num_attention_heads=6, num_query_groups=2,
    kv_channels=32, vocab_size=512, seq_length=384, max_position_embeddings=384, rotary_base=500000.0,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
_ON_CUDA = ModelConfig(
    num_layers=16, hidden_size=2048, ffn_hidden_size=5632, num_attention_heads=16, num_query_groups=4,
    kv_channels=128, vocab_size=8192, seq_length=1024, max_position_embeddings=1024, rotary_base=500000.0,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
_BUCKETS = 20
"""Approximate number of buckets of the model."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one rank."""

    rank: int
    store: str
    """File of the FileStore through which the ranks find each other."""
    output: str
    """File for the results."""
    cuda: bool
    mbit: float
    """Speed of the cable; 0: communication takes as long as compute. Not used with CUDA."""
    schedule: dict[str, list[int]]
    """Number of accumulated micro-batches -> number of rounds, timed steps per round."""

    def to_json(self) -> str:
        """The argument of the process."""
        return json.dumps(asdict(self))


def run_config(cuda: bool, accumulation: int) -> RunConfig:
    """The run that all contenders train: bf16 weights, fp32 gradients."""
    model = _ON_CUDA if cuda else _ON_CPU
    return RunConfig(
        model=model,
        parallel=ParallelConfig(nproc_per_node=NUM_RANKS),
        training=TrainingConfig(
            micro_batch_size=1, global_batch_size=NUM_RANKS * accumulation, train_iters=1000
        ),
        optimizer=OptimizerConfig(
            lr=1e-4, min_lr=1e-4, reduce_bucket_size=_num_parameters(model) // _BUCKETS
        ),
        data=DataConfig(train_data_path="none", max_padding_length=model.seq_length),
        checkpoint=CheckpointConfig(output_path="none"),
    )


def _num_parameters(model: ModelConfig) -> int:
    """Number of parameters in matrices."""
    attention = (2 * model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    layer = model.hidden_size * (attention + 3 * model.ffn_hidden_size)
    return model.num_layers * layer + 2 * model.vocab_size * model.hidden_size


def run_rank(task: Task) -> dict[str, Any]:
    """Connect to the other rank, set the cable's speed, time all contenders; equal on both ranks."""
    import torch
    import torch.distributed as dist

    from patch import compat
    from patch.device import DeviceContext
    from patch.distributed.groups import initialize, shutdown
    from toolkits.benchmarks import _contenders as contenders
    from toolkits.benchmarks._upstream import prepare_cpu

    torch.set_num_threads(1)
    context = DeviceContext.select(task.rank)
    device = context.device
    compat.apply(cuda=context.is_cuda)
    if not context.is_cuda:
        prepare_cpu()
    store = dist.FileStore(task.store, NUM_RANKS)
    dist.init_process_group(context.backend, store=store, rank=task.rank, world_size=NUM_RANKS)
    groups = initialize(run_config(task.cuda, 1), context)
    result: dict[str, Any] = {"mbit": None, "rounds": {}}
    for accumulation, (rounds, steps) in task.schedule.items():
        by_name = contenders.build_contenders(run_config(task.cuda, int(accumulation)), groups, device)
        if result["mbit"] is None and not context.is_cuda:
            result["mbit"] = _set_speed(task.mbit, by_name, device)
        result["rounds"][accumulation] = _time_all(by_name, rounds, steps, device)
        result["bytes"] = by_name[COMMUNICATION].num_bytes  # type: ignore[attr-defined]
    shutdown()
    return result


def _set_speed(mbit: float, by_name: dict[str, Any], device: Any) -> float:
    """Limit the cable to `mbit`, or to the speed at which communication takes as long as compute."""
    from toolkits.benchmarks._link import limit_speed

    if mbit:
        limit_speed(mbit)
        return mbit
    compute = _undisturbed(by_name[COMPUTE], device)
    mbit = by_name[COMMUNICATION].num_bytes * 8e-6 / compute
    limit_speed(mbit)
    # Headers and waits make it slower, so the speed is corrected once by a measurement.
    mbit *= _undisturbed(by_name[COMMUNICATION], device) / compute
    limit_speed(mbit)
    return mbit


def _undisturbed(contender: Any, device: Any) -> float:
    """Seconds of the fastest of a few steps, which other work on the machine disturbs least."""
    from toolkits.benchmarks._contenders import time_round

    return min(_slowest(time_round(contender, 1, device)[0]) for _ in range(4))


def _time_all(by_name: dict[str, Any], rounds: int, steps: int, device: Any) -> dict[str, list[dict]]:
    """Time every contender in each round; each round begins with another contender."""
    from toolkits.benchmarks._contenders import time_round

    names = list(by_name)
    for name in names:
        by_name[name].step()  # upstream does not overlap in its first step
        by_name[name].settle()
    measured: dict[str, list[dict]] = {name: [] for name in names}
    for index in range(rounds):
        first = index * 3 % len(names)
        for name in names[first:] + names[:first]:
            seconds, loss = time_round(by_name[name], steps, device)
            measured[name].append({"seconds": _slowest(seconds), "loss": loss})
    return measured


def _slowest(seconds: float) -> float:
    import torch
    import torch.distributed as dist

    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()


if __name__ == "__main__":
    given = Task(**json.loads(sys.argv[1]))
    measured = run_rank(given)
    if given.rank == 0:
        Path(given.output).write_text(json.dumps(measured), encoding="utf-8")
