"""A rank with all of megatron-core's groups sleeps while it has nothing to do, and all groups work."""

import resource
import time

import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from megatron.core import parallel_state
from small_runs import small_run
from training_runs import CPU

from patch import compat
from patch.distributed.groups import initialize

IDLE_S = 0.3


def wake_ups(rank: int, world_size: int, is_mended: bool) -> tuple[int, list[float]]:
    """How often this process wakes in IDLE_S, and what each kind of group sums of the ranks plus one."""
    compat.apply(cuda=False)
    if is_mended:
        groups = initialize(small_run(tp=2), CPU)
        sums = []
        for group in (groups.tp, groups.mp, groups.dp, groups.pp, None):
            value = torch.tensor([rank + 1.0])
            dist.all_reduce(value, group=group)
            sums.append(value.item())
    else:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        sums = []
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    time.sleep(IDLE_S)
    return resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before, sums


def test_idle_rank_sleeps_and_its_groups_have_their_own_ranks() -> None:
    for rank, (count, sums) in enumerate(run_distributed(wake_ups, 2, True)):
        assert count < 200 * IDLE_S + 50
        assert sums == [3.0, 3.0, rank + 1.0, rank + 1.0, 3.0]


def test_upstream_alone_still_wakes_for_each_group() -> None:
    """When this fails, upstream has mended it: delete compat/gloo.py."""
    assert all(count > 1000 * IDLE_S for count, _ in run_distributed(wake_ups, 2, False))
