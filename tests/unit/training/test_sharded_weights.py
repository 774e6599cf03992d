"""A run whose ranks keep shards of weights: it starts, trains, saves and exports as one that has them whole.

The oracles: transformers' own folder, which is imported and exported again; a run at `gradients`, with the
same order of sums, for the bits of losses and files. No rank ever has memory for all weights.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from llama3_tokenizer import tiny_tokenizer
from small_runs import ON_HOST, ZERO_3, hf_llama, small_run
from training_runs import CPU, SeededReader, save

from patch import compat
from patch.config.schema import RunConfig
from patch.convert import export_hf
from patch.distributed.groups import initialize
from patch.memory import SimulatedDevice
from patch.optimizer.sharded_flat import ShardedFlat
from patch.training.objective import Objective
from patch.training.run_state import Progress, checksum, resume
from patch.training.setup import Run, RunData, build_model, load_start
from patch.training.step import train_step

LEVELS: dict[str, dict[str, Any]] = {
    "gradients": {"data_parallel_sharding": "gradients"},
    "parameters": ZERO_3,
    "host": ON_HOST,
}
STEPS = 3


def build(level: str, load: Path | None) -> Run:
    changes = LEVELS[level] | {"dp": 2, "global_batch_size": 8, "reduce_bucket_size": 9000}
    changes |= {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}  # rounded by each number's place
    return run_of(small_run(load=None if load is None else str(load), **changes))


def run_of(config: RunConfig) -> Run:
    compat.apply(cuda=False)
    groups = initialize(config, CPU)
    stages, optimizer = build_model(config, groups, CPU.device)
    reader = SeededReader(config, groups.dp.rank())
    return Run(config, CPU.device, groups, stages, optimizer, RunData(Objective(config), reader, {}))


def export(run: Run, folder: Path) -> None:
    with run.optimizer.described_weights() as visit:
        export_hf(
            run.stages, folder, run.config.model, run.groups, hf_source=None, tokenizer=tiny_tokenizer(),
            visit=visit,
        )  # fmt: skip


def peak_of(run: Run, found: list[int]) -> None:
    """Note, within forward and backward of each layer, the bytes of weights that come and go."""
    flats = [flat for flat in run.optimizer.param_buffer.flats if isinstance(flat, ShardedFlat)]

    def note(*arguments: Any) -> None:
        memories = [run.memory for flat in flats for run in flat._of_units()]
        found.append(sum(memory.untyped_storage().nbytes() for memory in memories))

    for layer in run.stages[0].decoder.layers:
        layer.mlp.register_forward_hook(note)
        layer.mlp.register_full_backward_hook(note)


def go(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for level, other in (("gradients", "parameters"), ("parameters", "host"), ("host", "gradients")):
        run = build(level, folder / "hf")
        assert all(not flat.is_whole for flat in run.optimizer.param_buffer.flats) == (level != "gradients")
        load_start(run)
        export(run, folder / f"{level} as loaded")
        peaks: list[int] = []
        peak_of(run, peaks)
        losses = [train_step(run, iteration).loss for iteration in range(STEPS - 1)]
        save(folder / level, Progress(STEPS - 1, 8 * (STEPS - 1)), run.stages, run.optimizer)
        new_job()
        run = build(other, None)
        resume(folder / level, Progress(STEPS - 1, 8 * (STEPS - 1)), run.stages, run.optimizer, 0)
        losses.append(train_step(run, STEPS - 1).loss)
        export(run, folder / f"{level} trained")
        layer = sum(parameter.numel() for parameter in run.stages[0].decoder.layers[0].parameters())
        found[level] = losses, checksum(run.stages, run.optimizer), max(peaks) / (4 * layer)
        new_job()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    hf_llama(small_run(), folder / "hf")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_distributed(go, 2, folder)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("level", ["parameters", "host"])
def test_what_is_imported_is_exported_again_unit_by_unit(ranks: list, folder: Path, level: str) -> None:
    expected, found = tensors_of(folder / "hf"), tensors_of(folder / f"{level} as loaded")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("level", ["parameters", "host"])
def test_losses_and_weights_are_bitwise_those_of_whole_weights_and_levels_resume_each_other(
    ranks: list, folder: Path, level: str
) -> None:
    for found in ranks:
        assert found[level][:2] == found["gradients"][:2]
    expected, ours = (tensors_of(folder / f"{name} trained") for name in ("gradients", level))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_at_most_two_layers_are_whole_at_a_time(ranks: list) -> None:
    """Of four; the embedding (0.4 of a layer) before the first, and the head behind the last one."""
    for found in ranks:
        assert found["gradients"][2] == 0
        assert all(1.9 < found[level][2] <= 2 for level in ("parameters", "host"))


LARGE = {
    "num_layers": 24, "precision": "bf16", "recompute_granularity": "full", "reduce_bucket_size": 4096,
    "micro_batch_size": 1, "max_padding_length": 16, "seq_length": 16,
}  # fmt: skip


def alone(rank: int, world_size: int) -> dict[str, Any]:
    """Losses, checksum, bytes of the device at the start and at most; largest bucket; numbers of weights."""
    found: dict[str, Any] = {}
    for level, sharding in (("none", {"data_parallel_sharding": "none"}), ("host", {})):
        memory = found["none"][-1][0] * 2 // 3 if level == "host" else 10**12
        run = run_of(
            small_run(
                **LARGE | ON_HOST | sharding | {"cpu_offloading_weights": level == "host"},
                simulated_device_memory=memory,
            )
        )
        device = run.optimizer.placement.device
        assert isinstance(device, SimulatedDevice)
        before = device.allocated_bytes
        load_start(run)
        losses = [train_step(run, iteration).loss for iteration in range(STEPS)]
        sizes = [p.numel() for p in run.optimizer.parameters]
        layer = sum(p.numel() for p in run.stages[0].decoder.layers[0].parameters() if p.ndim > 1)
        numbers = sum(sizes), sum(size for size in sizes if size < 100), layer
        buckets = [bucket.range.numel for bucket in run.optimizer.grad_buffer.buckets]
        found[level] = (
            losses,
            checksum(run.stages, run.optimizer),
            before,
            device.pop_peak_bytes(),
            max(buckets),
            numbers,
        )
        new_job()
    return found


def test_one_process_trains_a_model_of_three_times_its_device_with_the_same_bits() -> None:
    """Oracles: the run whose weights stay on the device, for bits and for what is no weight or gradient; by
    hand, for the rest: norms and their gradients, staging buffers of two layers and of norms, two layers."""
    (found,) = run_distributed(alone, 1)
    *expected, whole, peak, _, (count, _, _) = found["none"]
    *ours, start, ours_at_most, bucket, (_, norms, layer) = found["host"]
    assert ours == expected and whole == 6 * count
    assert start == 6 * norms + 4 * (2 * bucket + norms)
    assert ours_at_most == pytest.approx(start + 2 * 2 * layer + peak - whole, rel=0.05)
