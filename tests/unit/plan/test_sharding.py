"""What a sharding level moves and holds, and which one auto takes."""

import pytest
import torch
from small_runs import small_run

from patch.checks.rules import RULES
from patch.config.choices import ZeroStage
from patch.device import MachineFacts
from patch.distributed.async_collectives import RoundedSums
from patch.plan.memory import bytes_per_rank, staging_bytes
from patch.plan.parameters import total_parameters
from patch.plan.sharding import resolve_sharding, stage_cost

CPU = MachineFacts(cuda_devices=0, cpu_cores=2)


def _run(level, micro_batches=1, **changes):
    return small_run(
        dp=4, global_batch_size=8 * micro_batches, data_parallel_sharding=level, precision="bf16",
        vocab_size=256, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("level", "gradients", "states"), [("none", 4, 10), ("optimizer", 4, 2.5), ("gradients", 1, 2.5)]
)
def test_bytes_held_follow_the_level(level, gradients, states):
    count = total_parameters(_run(level).model)
    assert bytes_per_rank(_run(level)) == (2 * count, gradients * count, states * count)
    assert stage_cost(_run("auto"), ZeroStage[level.upper()]).held == (2 + gradients + states) * count


@pytest.mark.parametrize(("level", "bytes_of_4_steps"), [("none", 8), ("optimizer", 6), ("gradients", 18)])
def test_bytes_moved_count_every_micro_batch_of_zero_2(level, bytes_of_4_steps):
    config = _run("auto", micro_batches=4)
    assert (
        stage_cost(config, ZeroStage[level.upper()]).moved
        == bytes_of_4_steps * total_parameters(config.model) * 3 // 4
    )


@pytest.mark.parametrize(
    ("level", "bytes_of_4_steps", "states"), [("none", 6, 10), ("optimizer", 5, 5), ("gradients", 11, 5)]
)
def test_two_instances_share_by_pairs_and_sum_their_shards_once(level, bytes_of_4_steps, states):
    """Half of 4 + 2, or of 4 x 4 + 2, bytes inside a pair, and of half of the gradients 2 x 4 / 2 across."""
    config = _run("auto", micro_batches=4, num_distributed_optimizer_instances=2)
    cost, count = stage_cost(config, ZeroStage[level.upper()]), total_parameters(config.model)
    assert cost.moved == bytes_of_4_steps * count
    assert cost.held == (2 + (2 if level == "gradients" else 4) + states) * count


@pytest.mark.parametrize(("level", "bytes_of_4_steps"), [("none", 8), ("optimizer", 4), ("gradients", 10)])
def test_rounded_gradients_are_half_the_bytes(level, bytes_of_4_steps):
    config = _run("auto", micro_batches=4, grad_reduce_in_bf16=True)
    moved = stage_cost(config, ZeroStage[level.upper()]).moved
    assert moved == bytes_of_4_steps * total_parameters(config.model) * 3 // 4


def test_all_rounded_gradients_travel_in_one_pair_of_buffers():
    plain, rounded = (
        _run("gradients", reduce_bucket_size=3000, grad_reduce_in_bf16=is_rounded)
        for is_rounded in (False, True)
    )
    pair = RoundedSums(3000, torch.bfloat16, torch.device("cpu")).num_bytes
    assert staging_bytes(rounded, 0, cuda=True) - staging_bytes(plain, 0, cuda=True) == pair


@pytest.mark.parametrize(("micro_batches", "level"), [(1, "gradients"), (4, "optimizer")])
def test_auto_goes_by_accumulation(micro_batches, level):
    config, lines = resolve_sharding(_run("auto", micro_batches), CPU)
    assert config.zero_stage is ZeroStage[level.upper()]
    assert len(lines) == 3 and [line for line in lines if level in line.split(": ")[1]][0].endswith("chosen")


def test_auto_takes_the_smaller_level_where_only_that_fits():
    fits = stage_cost(_run("auto", 4), ZeroStage.GRADIENTS).held
    gpu = MachineFacts(cuda_devices=4, cpu_cores=2, cuda_memory_bytes=fits + 1)
    assert resolve_sharding(_run("auto", 4), gpu)[0].zero_stage is ZeroStage.GRADIENTS


@pytest.mark.parametrize("do", [False, True])
@pytest.mark.parametrize(("dp", "batch"), [(1, 2), (1, 8), (2, 4), (2, 8)])
def test_what_auto_chooses_is_what_the_rules_allow(dp, batch, do):
    """With one replica all levels are equal, so it is what DO says."""
    asked = small_run(
        dp=dp, global_batch_size=batch, use_distributed_optimizer=do, data_parallel_sharding="auto"
    )
    config, _ = resolve_sharding(asked, CPU)
    for rule in RULES:
        rule(config, CPU)
    assert config.sharding != "auto"
    if dp == 1:
        assert config.zero_stage is (ZeroStage.OPTIMIZER if do else ZeroStage.NONE)


def test_a_level_that_was_asked_for_stays():
    config = _run("optimizer")
    assert resolve_sharding(config, CPU) == (config, [])
