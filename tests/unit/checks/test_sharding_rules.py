"""What is refused of the flags that say what data-parallel replicas share, and how it travels."""

import pytest
from refusals import refused
from small_runs import small_run

from patch.checks.layout import gradients_can_be_rounded, instances_share_states
from patch.checks.rules import notes
from patch.device import MachineFacts
from patch.errors import ConfigError

CPU = MachineFacts(cuda_devices=0, cpu_cores=2)
INSTANCES = "num_distributed_optimizer_instances"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp": 6, INSTANCES: 4}, "--num-distributed-optimizer-instances: got 4, expected 1 or 2 or 3: 6"),
        ({"dp": 2, INSTANCES: 2}, r"got 2, expected 1: 2 replicas \(DP x CP\) form instances"),
        ({INSTANCES: 2}, "got 2, expected 1: 1 replicas"),
        (
            {"dp": 4, INSTANCES: 2, "data_parallel_sharding": "none"},
            "got 2, expected 1: --data-parallel-sharding none: replicas share nothing",
        ),
    ],
)  # fmt: skip
def test_instances_without_equal_shares_are_refused(changes: dict, message: str) -> None:
    with refused(ConfigError, message):
        instances_share_states(small_run(**{"data_parallel_sharding": "optimizer"} | changes), CPU)


@pytest.mark.parametrize("changes", [{"dp": 4}, {"dp": 2, "cp": 2}, {"dp": 2, "cp": 3}])
def test_instances_of_two_ranks_or_three_are_taken(changes: dict) -> None:
    instances_share_states(small_run(**changes, **{INSTANCES: 2}, data_parallel_sharding="auto"), CPU)


def test_rounded_gradients_of_an_all_reduce_are_refused_and_of_one_replica_noted() -> None:
    with refused(ConfigError, "--grad-reduce-in-bf16: got true, expected false, or --data-parallel-sharding"):
        gradients_can_be_rounded(small_run(dp=2, grad_reduce_in_bf16=True), CPU)
    alone = small_run(grad_reduce_in_bf16=True)
    gradients_can_be_rounded(alone, CPU)
    assert "--grad-reduce-in-bf16 has no effect with one replica" in list(notes(alone, CPU))


def test_padding_of_what_is_not_sent_is_noted() -> None:
    padded = {"ddp_pad_buckets_for_high_nccl_busbw": True}
    note = "--ddp-pad-buckets-for-high-nccl-busbw has no effect with one replica"
    assert note in list(notes(small_run(**padded), CPU))
    assert note not in list(notes(small_run(dp=2, **padded), CPU))
