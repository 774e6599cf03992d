"""One rank of `overlap`: a process that builds all contenders and times them alternately."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from patch.config.schema import ModelConfig, ParallelConfig, RunConfig
from patch.device import DeviceContext
from patch.distributed.groups import initialize
from toolkits.benchmarks._contenders import build_contenders, time_round
from toolkits.benchmarks._link import limit_speed
from toolkits.benchmarks._overlap_figures import COMMUNICATION, COMPUTE
from toolkits.benchmarks._rank import run_as_rank, slowest
from toolkits.benchmarks._run_config import llama, run_config
from toolkits.benchmarks._upstream import prepare_cpu

# The vocabulary is small, because the embedding has the last gradient and the first weight, so no compute can
# overlap with its communication. It has 2 % of the parameters, as in a large LLaMA.
_ON_CPU = llama(
    384, num_layers=16, hidden_size=192, ffn_hidden_size=512, num_attention_heads=6, num_query_groups=2,
    kv_channels=32, vocab_size=512,
)  # fmt: skip
_ON_CUDA = llama(
    1024, num_layers=16, hidden_size=2048, ffn_hidden_size=5632, num_attention_heads=16, num_query_groups=4,
    kv_channels=128, vocab_size=8192,
)  # fmt: skip
_WAITING = llama(
    8, num_layers=32, hidden_size=96, ffn_hidden_size=256, num_attention_heads=3, num_query_groups=1,
    kv_channels=32, vocab_size=128,
)  # fmt: skip
"""As many layers as LLaMA-3.1 8B."""

_LEFT_OUT = ("ours: none", "upstream: no overlap", "upstream: gradients")
"""Contenders that are not the best at any accumulation: one round of 16 micro-batches takes minutes."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """The work of one rank."""

    cuda: bool
    wait_s: float = 0.0
    """Seconds of a micro-batch in layers that wait; 0: layers compute."""
    mbit: float
    """Speed of the cable; 0: communication takes as long as compute. Not used with CUDA."""
    buckets: int = 20
    """Buckets of the model, if they were all of one size."""
    schedule: dict[str, list[int]]
    """Number of accumulated micro-batches -> number of rounds, timed steps per round."""


def sharded_run(task: Task, num_ranks: int, accumulation: int) -> RunConfig:
    """The run that all contenders train: bf16 weights, fp32 gradients."""
    model = _WAITING if task.wait_s else _ON_CUDA if task.cuda else _ON_CPU
    return run_config(
        model, ParallelConfig(nproc_per_node=num_ranks),
        {"reduce_bucket_size": _num_parameters(model) // task.buckets},
        global_batch_size=num_ranks * accumulation, precision="bf16",
    )  # fmt: skip


def _num_parameters(model: ModelConfig) -> int:
    """Number of parameters in matrices."""
    attention = (2 * model.num_attention_heads + 2 * model.num_query_groups) * model.kv_channels
    layer = model.hidden_size * (attention + 3 * model.ffn_hidden_size)
    return model.num_layers * layer + 2 * model.vocab_size * model.hidden_size


def measure(task: Task, context: DeviceContext) -> dict[str, Any]:
    """Set the cable's speed, time all contenders; equal on all ranks."""
    device, num_ranks = context.device, dist.get_world_size()
    if not context.is_cuda:
        prepare_cpu()
    groups = initialize(sharded_run(task, num_ranks, 1), context)
    result: dict[str, Any] = {"mbit": None, "rounds": {}}
    for accumulation, (rounds, steps) in task.schedule.items():
        config = sharded_run(task, num_ranks, int(accumulation))
        without = _LEFT_OUT if task.wait_s and int(accumulation) > 1 else ()
        by_name = build_contenders(config, groups, device, task.wait_s, without)
        if result["mbit"] is None and not context.is_cuda:
            result["mbit"] = _set_speed(task.mbit, by_name, device)
        result["rounds"][accumulation] = _time_all(by_name, rounds, steps, device)
        result["bytes"] = by_name[COMMUNICATION].num_bytes  # type: ignore[attr-defined]
        result["buckets"] = {name: one.num_buckets for name, one in by_name.items()}
    return result


def _set_speed(mbit: float, by_name: dict[str, Any], device: torch.device) -> float:
    """Limit the cable to `mbit`, or to the speed at which communication takes as long as compute."""
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


def _undisturbed(contender: Any, device: torch.device) -> float:
    """Seconds of the fastest of a few steps, which other work on the machine disturbs least."""
    return min(slowest(time_round(contender, 1, device)[0], device) for _ in range(4))


def _time_all(
    by_name: dict[str, Any], rounds: int, steps: int, device: torch.device
) -> dict[str, list[dict]]:
    """Time every contender in each round; each round begins with another contender."""
    names = list(by_name)
    measured: dict[str, list[dict]] = {name: [] for name in names}
    for index in range(rounds):
        first = index * 3 % len(names)
        for name in names[first:] + names[:first]:
            seconds, loss = time_round(by_name[name], steps, device)
            measured[name].append({"seconds": slowest(seconds, device), "loss": loss})
    return measured


if __name__ == "__main__":
    run_as_rank(Task, measure)
