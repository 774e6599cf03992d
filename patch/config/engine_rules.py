"""What Transformer Engine's layers do not go with; then `--transformer-impl auto` takes our own layers."""

from __future__ import annotations

from patch.config.positions import where
from patch.config.schema import RunConfig

_MULTIPLE = 16
"""TE's 8-bit products need so many tokens, or a multiple."""


def engine_obstacle(config: RunConfig) -> str:
    """Which setting of a run Transformer Engine's layers do not support; "" if there is none."""
    training, parallel = config.training, config.parallel
    if config.model.precision_align is not None:
        return f"{where('precision_align')} computes in transformers' order of operations"
    if training.precision == "fp32":
        return f"{where('precision')} fp32: Transformer Engine multiplies float32 in TF32"
    if parallel.tp_comm_overlap and parallel.tensor_model_parallel_size > 1:
        return (
            f"{where('tp_comm_overlap')} is of our own layers; Transformer Engine's need user buffers for it"
        )
    return _fp8_obstacle(config) if training.precision == "fp8" else ""


def _fp8_obstacle(config: RunConfig) -> str:
    training, parallel = config.training, config.parallel
    fp8 = training.fp8
    if fp8.recipe == "rowwise":
        return f"{where('fp8_recipe')} rowwise: scales for each row are of our own layers"
    if training.fp8_param_gather:
        return f"{where('fp8_param_gather')} is of our own layers"
    if training.cpu_offloading or training.recompute_granularity == "auto":
        flag = "cpu_offloading" if training.cpu_offloading else "recompute_granularity"
        return f"{where(flag)}: with activations its 8-bit weights would travel to the host too"
    most_in_bf16 = config.model.num_layers // parallel.pipeline_model_parallel_size
    if max(fp8.num_first_in_bf16, fp8.num_last_in_bf16) > most_in_bf16:
        return (
            f"{where('first_last_layers_bf16')}: at most {most_in_bf16} of the first and of the last layers"
        )
    tokens = config.sample_length * training.micro_batch_size // parallel.context_parallel_size
    if parallel.sequence_parallel:
        tokens //= parallel.tensor_model_parallel_size
    if tokens % _MULTIPLE:
        return (
            f"a rank has {tokens} tokens of a micro-batch, its 8-bit products need a multiple of {_MULTIPLE}"
        )
    return ""
