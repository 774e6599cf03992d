"""What a sharding level moves and holds, and which one auto takes."""

import pytest
import torch
from planned_runs import planned_run
from small_runs import small_run

from patch.checks.rules import is_legal
from patch.config.choices import ZeroStage
from patch.device import MachineFacts
from patch.distributed.async_collectives import RoundedSums
from patch.plan.fits import fit_of
from patch.plan.memory import all_bytes, bytes_per_rank, staging_bytes
from patch.plan.parameters import total_parameters
from patch.plan.planned_run import plan_run
from patch.plan.resolve import resolve_run, resolve_sharding, resolve_weights, with_sharding
from patch.plan.timing.machine import PRESETS

CPU = MachineFacts(cuda_devices=0, cpu_cores=2)


def _run(level, **changes):
    return small_run(
        dp=4, global_batch_size=8, data_parallel_sharding=level, precision="bf16",
        vocab_size=256, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(("instances", "states"), [(1, 2.5), (2, 5)])
def test_bytes_held_follow_the_level_and_the_ranks_that_share(instances, states):
    config = _run("auto", num_distributed_optimizer_instances=instances, param_persistence_threshold=0)
    held = [bytes_per_rank(with_sharding(config, stage)).total for stage in ZeroStage]
    count = total_parameters(config.model)
    assert held[:3] == [(2 + 4 + 10) * count, (2 + 4 + states) * count, (2 + (4 / 10 + 1) * states) * count]
    assert held[3] == (2 + 4 + 10) * count * instances / 4
    matrices = config.model.num_layers * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 160 * 64)
    for optimizer, with_one_moment in (("sgd", count), ("muon", matrices)):
        assert held[0] - bytes_per_rank(_run("none", optimizer=optimizer)).total == 4 * with_one_moment


def test_all_rounded_gradients_travel_in_two_pairs_of_buffers():
    plain, rounded = (
        _run("gradients", reduce_bucket_size=3000, grad_reduce_in_bf16=is_rounded)
        for is_rounded in (False, True)
    )
    pairs = RoundedSums(3000, torch.bfloat16, torch.device("cpu")).num_bytes
    assert staging_bytes(rounded, 0, cuda=True) - staging_bytes(plain, 0, cuda=True) == pairs


@pytest.mark.parametrize(
    ("dp", "batch", "do", "level"),
    [(1, 8, False, "none"), (1, 2, True, "optimizer"), (2, 4, False, "gradients"), (2, 8, True, "optimizer")],
)
def test_auto_goes_by_accumulation_and_with_one_replica_by_do(dp, batch, do, level):
    asked = small_run(
        dp=dp, global_batch_size=batch, use_distributed_optimizer=do, data_parallel_sharding="auto"
    )
    config, lines = resolve_sharding(asked, CPU)
    assert config.zero_stage is ZeroStage[level.upper()] and is_legal(config, CPU)
    assert [line for line in lines if line.endswith("chosen")][0].split()[2] == level


@pytest.mark.parametrize("level", [*ZeroStage][1:])
def test_auto_takes_the_first_level_that_fits(level):
    asked = planned_run(dp=8, sharding="--data-parallel-sharding auto")
    needed = fit_of(with_sharding(asked, level), MachineFacts(8, 2, 2**40)).device_needed
    needed += (level is ZeroStage.PARAMETERS) * 700_000_000  # a third communicator
    gpu = MachineFacts(cuda_devices=8, cpu_cores=2, cuda_memory_bytes=int((needed + 2**30) / 0.95) + 4)
    chosen = resolve_sharding(asked, gpu)[0]
    assert chosen.zero_stage is level and resolve_sharding(chosen, gpu) == (chosen, [])


def test_levels_hold_what_the_paper_of_zero_says():
    """arXiv:1910.02054, figure 1: 7.5 billion parameters, 64 GPUs, 2 + 2 + 12 bytes of each."""
    flags = "--precision fp16 --main-grads-dtype bf16 --param-persistence-threshold 0"
    run = planned_run(size="llama2-7B", dp=64, flags=flags)
    held = [all_bytes(with_sharding(run, stage), None).total for stage in ZeroStage]
    of_paper = [round(7.5 * each / total_parameters(run.model), 1) for each in held]
    assert of_paper == [120, 31.4, 16.6, 1.9]


ZERO_3 = "--data-parallel-sharding parameters"
ON_HOST = "--optimizer-offload-policy static --cpu-offloading-weights"


def test_auto_puts_as_few_weights_on_the_host_as_fit():
    flags = f"{ON_HOST} --cpu-offloading-weights-fraction auto"
    run = planned_run(dp=1, size="llama2-13B", sharding=ZERO_3, flags=flags)
    facts = PRESETS["h100"].facts
    found, (line,) = resolve_weights(run, facts)
    share = found.optimizer.cpu_offloading_weights_fraction
    assert 0 < share < 1 and line.startswith(f"--cpu-offloading-weights-fraction auto: {share:g}, with ")
    _, (less,) = resolve_weights(planned_run(size="1B", sharding=ZERO_3, flags=flags), facts)
    assert fit_of(found, facts).is_on_device and "auto: 0, " in less
    large = planned_run(dp=1, size="70B", flags=f"{flags} --optimizer-offload-fraction 0.57", sharding=ZERO_3)
    assert resolve_weights(large, facts)[0].optimizer.cpu_offloading_weights_fraction == 0.57
    assert resolve_weights(found, facts) == (found, [])


@pytest.mark.parametrize(
    ("size", "share", "said"),
    [("tiny --vocab-size 512", 0.5, ["by plan host memory takes all", "all are below"]), ("8B", 0.0, [])],
)
def test_a_folder_without_states_and_shards_of_nothing_are_said(size, share, said):
    flags = f"--optimizer-offload-policy static --offload-folder a --optimizer-offload-host-share {share}"
    _, notes = resolve_run(planned_run(size=size, dp=2, flags=flags, sharding=ZERO_3), PRESETS["h100"].facts)
    assert len(notes) == len(said) and all(words in note for words, note in zip(said, notes, strict=True))


@pytest.mark.parametrize(
    ("machine", "run", "fits"),
    [
        ("h100 2", "--model-size 70B", False),
        ("h100 4", "--model-size 70B", True),
        # 120 billion parameters on one device (MegaTrain, arXiv:2604.05091), here with 16 bytes of each
        ("h100 1 1", f"--model-size 70B --num-layers 138 {ON_HOST}", True),
        ("h200 1 1", f"--model-size 70B --num-layers 150 {ON_HOST}", False),  # 2.1 TB
        ("h200 1 1", f"--model-size 70B --num-layers 150 {ON_HOST} --exp-avg-dtype bf16", True),
        ("h200 1 1", f"--model-size 70B --num-layers 170 {ON_HOST} --offload-folder a", True),
    ],
)
def test_what_shards_and_the_host_let_fit(machine, run, fits):
    name, *numbers = machine.split()
    argv = f"{run} --data-parallel-sharding parameters --recompute-granularity full".split()
    planned = plan_run(argv, name, *map(int, numbers), here=CPU)
    assert fit_of(planned.resolved, planned.machine.facts).is_whole == fits
