"""Models, runs and contenders of several benchmarks: our step as in every run, and rounds of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.fields import FIELDS, assemble, coerce
from patch.config.schema import RunConfig
from patch.data import Batch, BatchReader
from patch.model import LlamaModel, build_llama_model, initialize_weights
from patch.training.objective import Objective
from patch.training.setup import Run, RunData, build_run_optimizer
from patch.training.step import train_step
from toolkits.benchmarks._measure import now, over_ranks

_FIELDS: dict[str, Any] = {
    "rotary_base": 500000.0, "untie_embeddings_and_output_weights": True, "nproc_per_node": 1,
    "micro_batch_size": 1, "global_batch_size": 1, "train_iters": 10**6, "precision": "fp32",
    "lr": 1e-4, "min_lr": 1e-4, "train_data_path": "none", "output_path": "none",
}  # fmt: skip
SHAPE_8B = {
    "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8,
    "kv_channels": 128, "vocab_size": 128256,
}  # fmt: skip
"""LLaMA-3.1 8B but for its number of layers."""


def run_config(seq_length: int, **fields: Any) -> RunConfig:
    """A run of a LLaMA in fp32: one process, one sequence a step, without data and without end.

    Args:
        seq_length: tokens of a sequence.
        fields: the model's shape, and fields of any section that differ; words as in flags.
    """
    lengths = ("seq_length", "max_position_embeddings", "max_padding_length")
    values = {**_FIELDS, **dict.fromkeys(lengths, seq_length), **fields}
    words = {name: coerce(FIELDS[name], word, name) for name, word in values.items() if isinstance(word, str)}
    return assemble(values | words)


class Contender(Protocol):
    """What takes optimizer steps."""

    def step(self) -> float:
        """One optimizer step; returns the loss."""

    def settle(self) -> None:
        """Wait for what the last step has started."""


class Timed(NamedTuple):
    """A step of a contender."""

    seconds: float
    loss: float


class SameBatches:
    """A reader that returns the same micro-batches in every step; all tokens are learned."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        shape = (config.training.micro_batch_size, config.sample_length)
        self.batches = [
            Batch(
                torch.randint(config.model.vocab_size, shape, generator=generator),
                torch.randint(config.model.vocab_size, shape, generator=generator),
                torch.ones(shape),
            )
            for _ in range(config.num_micro_batches)
        ]

    def step(self, iteration: int) -> list[Batch]:
        """The micro-batches of this rank."""
        return self.batches


class OurTrainer:
    """The step of patch.training, as in every run, with nothing of data, checkpoints and logs.

    Args:
        config: the run.
        groups: the process groups of the job.
        device: the device of this rank.
        reader: gives the micro-batches; None: the same in each step.
        change: what is changed about each stage before its optimizer is built.
    """

    def __init__(
        self,
        config: RunConfig,
        groups: ProcessGroupCollection,
        device: torch.device,
        reader: BatchReader | SameBatches | None = None,
        change: Callable[[LlamaModel], None] = lambda stage: None,
    ) -> None:
        stages = build_llama_model(config.model, groups, device, config.execution)
        initialize_weights(stages, config.model, config.training.seed)
        for stage in stages:
            change(stage)
        data = RunData(Objective(config), reader or SameBatches(config, groups.dp.rank()), {})
        optimizer = build_run_optimizer(stages, config, groups)
        self.run = Run(config, device, groups, stages, optimizer, data)
        self._iteration = 0

    def step(self) -> float:
        """One optimizer step, including the count of the next step's tokens."""
        loss = train_step(self.run, self._iteration).loss
        self._iteration += 1
        return loss

    def settle(self) -> None:
        """Wait for the updated weights."""
        self.run.optimizer.finish_param_sync()


def time_round(contender: Contender, steps: int, device: torch.device, untimed: int = 1) -> Timed:
    """Take untimed steps, then `steps` timed ones.

    After the untimed steps the timing is steady: each timed forward begins while the weights of the previous
    step are still being gathered, and the gather of the last step is not timed.

    Args:
        contender: the contender to time.
        steps: number of timed steps.
        device: the device of this rank.
        untimed: number of steps before them.
    Returns:
        seconds per step on the slowest rank, and the last loss.
    """
    for _ in range(untimed):
        contender.step()
    dist.barrier()
    begin = now(device)
    for _ in range(steps):
        loss = contender.step()
    seconds = now(device) - begin
    contender.settle()
    return Timed(over_ranks(seconds, device) / steps, loss)
