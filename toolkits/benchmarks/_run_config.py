"""The runs of the benchmarks: what they have in common beside the shape of a model."""

from __future__ import annotations

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
