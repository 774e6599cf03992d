"""Rules about what data-parallel replicas share."""

from __future__ import annotations

from patch.config.choices import ZeroStage
from patch.config.positions import where
from patch.config.refusal import refuse
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
