"""What a sharding level moves and holds, and which one auto takes."""

import pytest
import torch
from planned_runs import planned_run
from small_runs import small_run

from patch.checks.rules import RULES
from patch.config.choices import ZeroStage
from patch.device import MachineFacts
from patch.distributed.async_collectives import RoundedSums
from patch.plan.fits import fit_of
from patch.plan.memory import all_bytes, bytes_per_rank, host_bytes, staging_bytes, whole_bytes
from patch.plan.parameters import total_parameters
from patch.plan.planned_run import plan_run
from patch.plan.resolve import resolve_run, resolve_sharding, resolve_weights, with_sharding
from patch.plan.timing.machine_presets import PRESETS

CPU = MachineFacts(cuda_devices=0, cpu_cores=2)


def _run(level, micro_batches=1, **changes):
    return small_run(
        dp=4, global_batch_size=8 * micro_batches, data_parallel_sharding=level, precision="bf16",
        vocab_size=256, **changes,
    )  # fmt: skip


@pytest.mark.parametrize(("instances", "states"), [(1, 2.5), (2, 5)])
def test_bytes_held_follow_the_level_and_the_ranks_that_share(instances, states):
    config = _run("auto", num_distributed_optimizer_instances=instances, param_persistence_threshold=0)
    held = [bytes_per_rank(with_sharding(config, stage)).total for stage in ZeroStage]
    count = total_parameters(config.model)
    assert held[:3] == [(2 + 4 + 10) * count, (2 + 4 + states) * count, (2 + (4 / 10 + 1) * states) * count]
    assert held[3] == (2 + 4 + 10) * count * instances / 4


def test_all_rounded_gradients_travel_in_two_pairs_of_buffers():
    plain, rounded = (
        _run("gradients", reduce_bucket_size=3000, grad_reduce_in_bf16=is_rounded)
        for is_rounded in (False, True)
    )
    pairs = RoundedSums(3000, torch.bfloat16, torch.device("cpu")).num_bytes
    assert staging_bytes(rounded, 0, cuda=True) - staging_bytes(plain, 0, cuda=True) == pairs


@pytest.mark.parametrize(("micro_batches", "level"), [(1, "gradients"), (4, "optimizer")])
def test_auto_goes_by_accumulation(micro_batches, level):
    config, lines = resolve_sharding(_run("auto", micro_batches), CPU)
    assert config.zero_stage is ZeroStage[level.upper()]
    assert [line for line in lines if level in line.split(": ")[1]][0].endswith("chosen")


@pytest.mark.parametrize("level", [ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS])
def test_auto_takes_the_first_level_that_fits(level):
    asked = planned_run(dp=8, sharding="--data-parallel-sharding auto")
    needed = fit_of(with_sharding(asked, level), MachineFacts(8, 2, 2**40)).device_needed
    gpu = MachineFacts(cuda_devices=8, cpu_cores=2, cuda_memory_bytes=int((needed + 2**30) / 0.95) + 4)
    assert resolve_sharding(asked, gpu)[0].zero_stage is level


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


def test_levels_hold_what_the_paper_of_zero_says():
    """arXiv:1910.02054, figure 1: 7.5 billion parameters, 64 GPUs, 2 + 2 + 12 bytes of each."""
    flags = "--precision fp16 --main-grads-dtype bf16 --param-persistence-threshold 0"
    run = planned_run(size="llama2-7B", dp=64, flags=flags)
    held = [all_bytes(with_sharding(run, stage), None).total for stage in ZeroStage]
    of_paper = [round(7.5 * each / total_parameters(run.model), 1) for each in held]
    assert of_paper == [120, 31.4, 16.6, 1.9]


EMBEDDING, LAYER, NORM = 128256 * 4096, 4096 * (4096 + 6144 + 3 * 14336), 4096
"""Parameters of LLaMA 8B: both ends have one embedding; the layer without its two norms."""


def test_weights_in_shards_are_whole_two_modules_at_a_time():
    """Norms stay whole; the embedding, or the output layer, and a layer are the largest neighbours."""
    run = planned_run(dp=8, sharding="--data-parallel-sharding parameters")
    assert bytes_per_rank(run).weights == 2 * (2 * EMBEDDING + 32 * LAYER) // 8 + 2 * 65 * NORM
    assert whole_bytes(run) == 2 * (EMBEDDING + LAYER)
    stand_in = 2 * 2 * 14336 * 4096
    assert staging_bytes(run, 0, cuda=True) == 4 * (2 * 500_000_000 + 65 * NORM) + stand_in
    last = planned_run(dp=2, pp=2, tp=2, sharding="--data-parallel-sharding parameters")
    assert bytes_per_rank(last, 1).weights == (EMBEDDING + 16 * LAYER) // 2 + 2 * 33 * NORM
    assert whole_bytes(last, 1) == EMBEDDING + LAYER
    tied = planned_run(dp=8, size="1B", sharding="--data-parallel-sharding parameters")
    assert bytes_per_rank(tied).weights > 2 * 128256 * 2048  # one stage reads it at both ends
    alone = planned_run(dp=1, sharding="--data-parallel-sharding parameters")
    assert whole_bytes(alone) == 0 and bytes_per_rank(alone) == bytes_per_rank(planned_run(dp=1))


def test_weights_of_experts_are_in_shards_of_their_own_replicas():
    flags = "--expert-model-parallel-size 4 --param-persistence-threshold 0"
    run = planned_run(size="30B-A3B", dp=8, flags=flags, sharding="--data-parallel-sharding parameters")
    experts = 48 * 128 // 4 * 3 * 768 * 2048
    others = total_parameters(run.model) - 4 * experts
    assert bytes_per_rank(run).weights == pytest.approx(2 * (others / 8 + experts / 2), rel=1e-3)


ZERO_3 = "--data-parallel-sharding parameters"
ON_HOST = "--optimizer-offload-policy static --cpu-offloading-weights"


def test_a_share_of_weights_and_gradients_lies_in_host_memory():
    run = planned_run(dp=1, sharding=ZERO_3, flags=ON_HOST)
    count = 2 * EMBEDDING + 32 * LAYER
    assert host_bytes(run) == (2 * count, 4 * (count + 65 * NORM), 10 * (count + 65 * NORM))
    assert bytes_per_rank(run) == (2 * 65 * NORM, 0, 0) and whole_bytes(run) == 2 * (EMBEDDING + LAYER)
    flags = f"{ON_HOST} --cpu-offloading-weights-fraction 0.25"
    quarter = planned_run(dp=1, sharding=ZERO_3, flags=flags)
    assert host_bytes(quarter).weights == count // 2


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
        ("h100 1", "--model-size 70B", False),
        ("h100 2", "--model-size 70B", False),
        ("h100 4", "--model-size 70B", True),
        ("h100 1", "--model-size 70B --optimizer-offload-policy static --reduce-bucket-size 1e8", True),
        # 120 billion parameters on one device (MegaTrain, arXiv:2604.05091), here with 16 bytes of each
        ("h200 1 1", f"--model-size 70B --num-layers 138 {ON_HOST}", True),
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


def test_auto_shards_parameters_where_only_that_fits():
    run = planned_run(
        size="70B", dp=32, sharding="--data-parallel-sharding auto", flags="--recompute-granularity auto"
    )
    found, lines = resolve_sharding(run, PRESETS["h100"].facts)
    assert found.zero_stage is ZeroStage.PARAMETERS and lines[-1].endswith("chosen")
