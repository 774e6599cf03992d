"""What a sharding level moves and holds, and which one auto takes."""

import pytest
import torch
from small_runs import small_run

from patch.checks.rules import RULES
from patch.config.choices import ZeroStage
from patch.device import MachineFacts
from patch.distributed.async_collectives import RoundedSums
from patch.plan.memory import staging_bytes
from patch.plan.parameters import total_parameters
from patch.plan.resolve import resolve_sharding, stage_cost

CPU = MachineFacts(cuda_devices=0, cpu_cores=2)


def _run(level, micro_batches=1, **changes):
    return small_run(
        dp=4, global_batch_size=8 * micro_batches, data_parallel_sharding=level, precision="bf16",
        vocab_size=256, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        (
            {},
            {"none": 8, "optimizer": 6, "gradients": 18, "parameters": 32},
        ),  # from ZeRO-2 on each micro-batch
        ({"grad_reduce_in_bf16": True}, {"none": 8, "optimizer": 4, "gradients": 10, "parameters": 24}),
        # half of 4 + 2, or of 4 x 4 + 2, bytes inside a pair, and of half of the gradients 2 x 4 / 2 across
        ({"num_distributed_optimizer_instances": 2}, {"none": 8, "optimizer": 20 / 3, "gradients": 44 / 3}),
    ],
)
def test_bytes_moved_in_a_step_of_four_micro_batches(changes, moved):
    config = _run("auto", micro_batches=4, **changes)
    for level, of_parameter in moved.items():
        expected = of_parameter * total_parameters(config.model) * 3 / 4
        assert stage_cost(config, ZeroStage[level.upper()]).moved == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(("instances", "states"), [(1, 2.5), (2, 5)])
def test_bytes_held_follow_the_level_and_the_ranks_that_share(instances, states):
    config = _run("auto", num_distributed_optimizer_instances=instances, param_persistence_threshold=0)
    held, count = [stage_cost(config, stage).held for stage in ZeroStage], total_parameters(config.model)
    assert held[:3] == [(2 + 4 + 10) * count, (2 + 4 + states) * count, (2 + (4 / 10 + 1) * states) * count]
    assert held[3] == (2 + 4 + 10) * count * instances / 4


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
    assert len(lines) == 4 and [line for line in lines if level in line.split(": ")[1]][0].endswith("chosen")


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
