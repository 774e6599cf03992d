"""Rules about what data-parallel replicas share."""

from __future__ import annotations

from collections.abc import Iterator

from patch.config.choices import ZeroStage
from patch.config.positions import refuse, where
from patch.config.schema import RunConfig
from patch.device import MachineFacts


def sharding_is_said_once(config: RunConfig, machine: MachineFacts) -> None:
    """The flags that choose what replicas share do not contradict each other."""
    parallel = config.parallel
    if parallel.overlapped_distributed_optimizer and not parallel.use_distributed_optimizer:
        why = "it shards gradients in addition to the optimizer's states"
        refuse("overlapped_distributed_optimizer", "true", f"{where('use_distributed_optimizer')} true", why)
    if parallel.use_distributed_optimizer and parallel.data_parallel_sharding is ZeroStage.NONE:
        expected = "optimizer, gradients, auto, or none with DO=false"
        refuse("data_parallel_sharding", "none", expected, "DO=true shards the optimizer's states")


def instances_share_states(config: RunConfig, machine: MachineFacts) -> None:
    """Every instance of the distributed optimizer has equally many ranks, which share something."""
    instances, copies = config.parallel.num_distributed_optimizer_instances, config.num_weight_copies
    if instances == 1:
        return
    if config.sharding is ZeroStage.NONE:
        why = f"{where('data_parallel_sharding')} none: replicas share nothing"
        refuse("num_distributed_optimizer_instances", instances, "1", why)
    if copies % instances or copies == instances:
        fitting = [str(number) for number in range(1, copies) if copies % number == 0] or ["1"]
        why = f"{copies} replicas (DP x CP) form instances of equally many, at least two, ranks"
        refuse("num_distributed_optimizer_instances", instances, " or ".join(fitting), why)


def gradients_can_be_rounded(config: RunConfig, machine: MachineFacts) -> None:
    """Gradients that travel as bf16 are added up in fp32 by the rank that keeps the sum."""
    is_summed_on_the_way = config.sharding is ZeroStage.NONE and config.num_weight_copies > 1
    if config.optimizer.grad_reduce_in_bf16 and is_summed_on_the_way:
        expected = f"false, or {where('data_parallel_sharding')} optimizer, gradients or auto"
        refuse("grad_reduce_in_bf16", "true", expected, "an all-reduce adds up in the type that travels")


def sharding_notes(config: RunConfig) -> Iterator[str]:
    """One line for each flag about replicas that has no effect in this run."""
    for field in ("grad_reduce_in_bf16", "ddp_pad_buckets_for_high_nccl_busbw"):
        if getattr(config.optimizer, field) and config.num_weight_copies == 1:
            yield f"{where(field)} has no effect with one replica"
