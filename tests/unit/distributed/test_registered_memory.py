"""Registered buffers without NCCL: the order, also after a failure, and the allocator's settings.

With an optimizer and groups of several ranks: tests/unit/optimizer/test_data_parallel.py.
"""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from distributed_runner import run_distributed
from recording_pool import RecordingPool
from refusals import refused

from patch.compat.nccl import fixed_segments
from patch.distributed.groups import shutdown
from patch.distributed.registered_memory import NcclPool, RegisteredMemory
from patch.errors import ConfigError, PatchError


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    shutdown()


def registered(pool: RecordingPool, groups: list[dist.ProcessGroup]) -> RegisteredMemory:
    memory = RegisteredMemory(pool, groups, is_wanted=True)
    with memory.allocating():
        torch.zeros(3)
    memory.register()
    return memory


def test_whoever_leaves_the_groups_has_deregistered_and_then_freed_before(group: dist.ProcessGroup) -> None:
    pools = [RecordingPool(), RecordingPool()]
    memories = [registered(pool, [group, group]) for pool in pools]
    memories[0].release()
    shutdown()
    memories[1].release()
    for pool in pools:
        assert [what for what, _ in pool.events] == ["allocate", "meet", "register", "deregister", "free"]


def test_after_a_failure_only_what_was_registered_is_deregistered(group: dist.ProcessGroup) -> None:
    class Failing(RecordingPool):
        def register(self, group: dist.ProcessGroup) -> None:
            if len(self.events) > 3:
                raise RuntimeError("NCCL says no")
            super().register(group)

    pool = Failing()
    with pytest.raises(RuntimeError, match="NCCL says no"):
        registered(pool, [group, dist.new_group([0])])
    RegisteredMemory.release_all()
    done = [what for what, _ in pool.events]
    assert done == ["allocate", "meet", "meet", "register", "deregister", "free"]


def _register_but_one(rank: int, world_size: int) -> None:
    class Failing(RecordingPool):
        def register(self, group: dist.ProcessGroup) -> None:
            raise RuntimeError("NCCL says no")

    pool = Failing() if rank else RecordingPool()
    alone = [dist.new_group([each]) for each in range(world_size)]
    with pytest.raises(RuntimeError if rank else PatchError, match="NCCL says no"):
        registered(pool, [dist.group.WORLD, alone[rank]])
    RegisteredMemory.release_all()
    if rank == 0:
        undone = ["register", "register", "deregister", "deregister", "free"]
        assert [what for what, _ in pool.events] == ["allocate", "meet", "meet", *undone]


def test_no_rank_goes_on_where_one_cannot_register() -> None:
    run_distributed(_register_but_one, 2, timeout_s=60)


def test_tensors_of_a_cpu_are_refused(group: dist.ProcessGroup) -> None:
    expected = "--use-nccl-ub: got true with tensors on cpu over gloo, expected a GPU and NCCL, or false"
    with refused(ConfigError, expected):
        NcclPool(group, torch.device("cpu"))


@pytest.mark.skipif(not hasattr(torch._C, "_accelerator_getAllocatorSettings"), reason="torch 2.11 is silent")
def test_segments_do_not_grow_inside_and_all_other_settings_stay() -> None:
    now = torch._C._accelerator_getAllocatorSettings
    before = now()
    try:
        for own, inside in [
            ({}, before),
            ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, before),
            (
                {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512,expandable_segments:True"},
                "max_split_size_mb:512,expandable_segments:False",
            ),
        ]:
            with fixed_segments(own):
                assert now() == inside
        assert now() == "max_split_size_mb:512,expandable_segments:True"
    finally:
        torch._C._accelerator_setAllocatorSettings(before)
