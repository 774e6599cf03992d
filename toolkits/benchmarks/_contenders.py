"""Models, runs and contenders of several benchmarks: our step as in every run, and rounds of steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from patch.config.schema import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from patch.data import Batch, BatchReader
from patch.model import LlamaModel, build_llama_model, initialize_weights
from patch.training.setup import Run, build_run_optimizer
from patch.training.step import train_step
from toolkits.benchmarks._measure import now, over_ranks

_TRAINING: dict[str, Any] = {
    "micro_batch_size": 1, "global_batch_size": 1, "train_iters": 10**6, "precision": "fp32"
}  # fmt: skip
_OPTIMIZER: dict[str, Any] = {"lr": 1e-4, "min_lr": 1e-4}


def llama(seq_length: int, **shape: Any) -> ModelConfig:
    """A LLaMA-3 for sequences of at most `seq_length` tokens; `shape` are other fields of ModelConfig."""
    return ModelConfig(
        seq_length=seq_length, max_position_embeddings=seq_length, rotary_base=500000.0,
        untie_embeddings_and_output_weights=True, **shape,
    )  # fmt: skip


def llama_8b(seq_length: int, layers: int, **shape: Any) -> ModelConfig:
    """Some layers of LLaMA-3.1 8B, with its embedding and output layer."""
    return llama(
        seq_length, num_layers=layers, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32,
        num_query_groups=8, kv_channels=128, vocab_size=128256, **shape,
    )  # fmt: skip


def run_config(
    model: ModelConfig,
    parallel: ParallelConfig | None = None,
    optimizer: dict[str, Any] | None = None,
    **training: Any,
) -> RunConfig:
    """A run in fp32 of one sequence a step and a constant learning rate, without data and without end.

    Args:
        model: the shape.
        parallel: the layout; None: one process.
        optimizer: fields of OptimizerConfig that differ.
        training: fields of TrainingConfig that differ.
    """
    return RunConfig(
        model=model,
        parallel=parallel or ParallelConfig(nproc_per_node=1),
        training=TrainingConfig(**_TRAINING | training),
        optimizer=OptimizerConfig(**_OPTIMIZER | (optimizer or {})),
        data=DataConfig(train_data_path="none", max_padding_length=model.seq_length),
        checkpoint=CheckpointConfig(output_path="none"),
    )


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
        self.run = Run(
            config=config, device=device, groups=groups, tokenizer=None, valid_readers={}, stages=stages,
            train_reader=reader or SameBatches(config, groups.dp.rank()),  # type: ignore[arg-type]
            optimizer=build_run_optimizer(stages, config, groups), start_iteration=0,
        )  # fmt: skip
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
