"""A run whose ranks keep shards of weights, or 8 bits: none ever has memory for all, from import to export.

That they change no bit: test_bits.py. Resumes: test_any_layout.py.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from llama3_tokenizer import tiny_tokenizer
from safetensors.torch import load_file
from small_runs import ON_HOST, ZERO_3, hf_llama, small_run
from training_runs import CPU, SeededReader, build_seeded_run

from patch import compat
from patch.config.schema import RunConfig
from patch.convert import export_hf
from patch.distributed.groups import initialize
from patch.errors import TrainingError
from patch.memory.simulated_device import SimulatedDevice
from patch.optimizer.zero3.sharded_params import Zero3FlatParams
from patch.plan.memory import bytes_per_rank, gathered_unit_bytes
from patch.training.objectives.objective import Objective
from patch.training.run_state import checksum
from patch.training.setup import Run, RunData, build_model, load_start
from patch.training.step import train_step

LEVELS: dict[str, dict[str, Any]] = {"parameters": ZERO_3, "host": ON_HOST}
STEPS = 3


def run_of(config: RunConfig) -> Run:
    compat.apply(cuda=False)
    groups = initialize(config, CPU)
    stages, optimizer = build_model(config, groups, CPU.device)
    reader = SeededReader(config, groups.dp.rank())
    return Run(config, CPU.device, groups, stages, optimizer, RunData(Objective(config), reader, {}))


def export(run: Run, folder: Path) -> None:
    with run.optimizer.meta_weights() as visit:
        export_hf(
            run.stages, folder, run.config.model, run.groups, hf_source=None, tokenizer=tiny_tokenizer(),
            visit=visit,
        )  # fmt: skip


def peak_of(run: Run, found: list[int]) -> None:
    """Note, within forward and backward of each layer, the bytes of gathered weights."""
    flats = [flat for flat in run.optimizer.param_buffer.flats if isinstance(flat, Zero3FlatParams)]

    def note(*arguments: Any) -> None:
        memories = [run.memory for flat in flats for unit in flat.units for run in flat._runs[unit]]
        found.append(sum(memory.untyped_storage().nbytes() for memory in memories))

    for layer in run.stages[0].decoder.layers:
        layer.mlp.register_forward_hook(note)
        layer.mlp.register_full_backward_hook(note)


def go(rank: int, world_size: int, folder: Path) -> dict[str, float]:
    """By level: the most bytes of gathered weights, in layers."""
    found = {}
    for level in LEVELS:
        config = small_run(dp=2, reduce_bucket_size=9000, load=str(folder / "hf"), **LEVELS[level])
        run = run_of(config)
        assert all(not flat.is_whole for flat in run.optimizer.param_buffer.flats)
        load_start(run)
        export(run, folder / level)
        peaks: list[int] = []
        peak_of(run, peaks)
        for iteration in range(2):
            train_step(run, iteration)
        layer = sum(parameter.numel() for parameter in run.stages[0].decoder.layers[0].parameters())
        found[level] = max(peaks) / (4 * layer)
        new_job()
    return found


def test_what_is_imported_is_exported_unit_by_unit_and_two_layers_are_whole_at_a_time(tmp_path: Path) -> None:
    """Of four; the embedding (0.4 of a layer) before the first, and the head behind the last one."""
    hf_llama(small_run(), tmp_path / "hf")
    for found in run_distributed(go, 2, tmp_path):
        assert all(1.9 < layers <= 2 for layers in found.values())
    expected, *exported = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", *LEVELS))
    for tensors in exported:
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], each) for name, each in expected.items())


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
            checksum(run),
            before,
            device.pop_peak_bytes(),
            max(buckets),
            numbers,
        )
        new_job()
    return found


@pytest.mark.long
def test_one_process_trains_a_model_of_three_times_its_device_with_the_same_bits() -> None:
    """Oracles: the run whose weights stay on the device, for bits and for what is no weight or gradient; by
    hand, for the rest: norms and their gradients, staging buffers of two layers, two layers."""
    (found,) = run_distributed(alone, 1)
    *expected, whole, peak, _, (count, _, _) = found["none"]
    *ours, start, ours_at_most, bucket, (_, norms, layer) = found["host"]
    assert ours == expected and whole == 6 * count
    assert start == 6 * norms + 4 * 2 * bucket
    assert ours_at_most == pytest.approx(start + 2 * 2 * layer + peak - whole, rel=0.05)


BF16, IN_8_BITS = {torch.bfloat16}, {torch.bfloat16, torch.float8_e4m3fn}


def types_after_a_step(level: str, is_used: bool) -> set[torch.dtype]:
    config = small_run(
        dp=2, precision="fp8", reduce_bucket_size=3000, param_persistence_threshold=100, global_batch_size=8,
        data_parallel_sharding=level, fp8_param_gather=is_used,
    )  # fmt: skip
    run = build_seeded_run(config)
    train_step(run, 0)
    assert run.optimizer.param_buffer.unit_bytes == pytest.approx(gathered_unit_bytes(config), rel=0.03)
    if level == "parameters":  # the shards, and what stays whole
        kept = run.optimizer.param_buffer.num_bytes
        assert kept == pytest.approx(bytes_per_rank(config).weights, rel=0.03)
    run.optimizer.finish_param_sync()
    types = {p.dtype for stage in run.stages for p in stage.parameters()}
    with pytest.raises(TrainingError, match="full_weights") if types != BF16 else nullcontext():
        run.stages[0].state_dict()
    new_job()
    return types


def types_of_weights(rank: int, world_size: int) -> list[set[torch.dtype]]:
    cases = (("none", True), ("optimizer", False), ("optimizer", True), ("parameters", True))
    return [types_after_a_step(*case) for case in cases]


@pytest.mark.long
def test_layers_keep_8_bits_where_replicas_share() -> None:
    assert run_distributed(types_of_weights, 2) == [[BF16, BF16, IN_8_BITS, IN_8_BITS]] * 2
