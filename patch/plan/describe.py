"""The plan in words: what `--dry-run` prints beside the YAML."""

from __future__ import annotations

from patch.config import RunConfig
from patch.plan.flops import model_flops_per_step
from patch.plan.memory import bytes_per_rank, offloaded_bytes
from patch.plan.parameters import total_parameters

_GIB = 2**30


def describe_plan(config: RunConfig) -> str:
    """A few lines: processes, parameters, bytes of model state on a rank, work of a step, length."""
    parallel, training = config.parallel, config.training
    stages = config.virtual_pipeline_size
    state = bytes_per_rank(config)
    host = offloaded_bytes(config)
    offloaded = f" ({host / _GIB:.2f} more in host memory)" if host else ""
    tokens = training.global_batch_size * config.sample_length
    return "\n".join(
        (
            f"processes   {config.world_size} = TP {parallel.tensor_model_parallel_size} "
            f"x PP {parallel.pipeline_model_parallel_size} x CP {parallel.context_parallel_size} "
            f"x DP {config.data_parallel_size} on {parallel.nnodes} machine(s)"
            + (f", {stages} interleaved stages each" if stages > 1 else ""),
            f"parameters  {_scaled(total_parameters(config))} ({config.model.model_size})",
            f"state/rank  {state.total / _GIB:.2f} GiB = weights {state.weights / _GIB:.2f} "
            f"+ gradients {state.gradients / _GIB:.2f} + optimizer {state.optimizer / _GIB:.2f}{offloaded}; "
            f"activations come on top (data-parallel sharding: {config.sharding_level})",
            f"step        {training.global_batch_size} samples x {config.sample_length} tokens = "
            f"{tokens} tokens, {config.num_micro_batches} micro-batch(es) a replica, "
            f"{_scaled(model_flops_per_step(config))}FLOP",
            f"run         {training.train_iters} steps = {_scaled(training.train_iters * tokens)} tokens",
        )
    )


def _scaled(number: float) -> str:
    """Three digits and a prefix: 8.03 G."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {prefix}"
    return f"{number:g} "
