"""`--fp8-param-gather`: what ranks keep between steps, as planned, and checkpoints that others go on from.

That it changes no bit: test_bits.py. Against one process: test_covered_layouts.py.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from training_runs import build_seeded_run, resume_seeded_run, save, stored_tensors

from patch.config.schema import RunConfig
from patch.errors import TrainingError
from patch.plan.memory import bytes_per_rank, whole_bytes
from patch.training.run_state import Progress
from patch.training.setup import checkpoint_root
from patch.training.step import train_step

pytestmark = pytest.mark.long

BF16, IN_8_BITS = {torch.bfloat16}, {torch.bfloat16, torch.float8_e4m3fn}


def run_of(**changes: Any) -> RunConfig:
    """Buckets have fewer elements than most weights."""
    settings = {"precision": "fp8", "reduce_bucket_size": 3000, "global_batch_size": 8, "dp": 2}
    settings["param_persistence_threshold"] = 100
    return small_run(**settings | changes)


WAYS: dict[str, dict[str, Any]] = {
    "16 bits": {"data_parallel_sharding": "gradients"},
    "8 bits": {"data_parallel_sharding": "gradients", "fp8_param_gather": True},
    "units": {"data_parallel_sharding": "parameters", "fp8_param_gather": True},
}
PAIRS = (("8 bits", "16 bits"), ("16 bits", "units"), ("units", "8 bits"), ("8 bits", "units"))


def types_after_a_step(level: str, is_used: bool) -> set[torch.dtype]:
    config = run_of(data_parallel_sharding=level, fp8_param_gather=is_used)
    run = build_seeded_run(config)
    train_step(run, 0)
    assert run.optimizer._units.num_bytes == pytest.approx(whole_bytes(config), rel=0.03)
    if level == "parameters":  # the shards, and what stays whole
        kept = run.optimizer.param_buffer.num_bytes
        assert kept == pytest.approx(bytes_per_rank(config).weights, rel=0.03)
    run.optimizer.finish_param_sync()
    types = {p.dtype for stage in run.stages for p in stage.parameters()}
    new_job()
    return types


def steps_and_save(config: RunConfig, num_steps: int) -> None:
    run = resume_seeded_run(config)
    for iteration in range(run.start_iteration, num_steps):
        train_step(run, iteration)
    save(checkpoint_root(config), Progress(num_steps, 0), run.stages, run.optimizer)
    is_used = config.training.fp8_param_gather
    with pytest.raises(TrainingError, match="full_weights") if is_used else nullcontext():
        run.stages[0].state_dict()
    new_job()


def run_all(rank: int, world_size: int, folder: Path) -> list[set[torch.dtype]]:
    """Types of weights, by sharding; and two steps in one way and two more in another."""
    cases = (("none", True), ("optimizer", False), ("optimizer", True), ("parameters", True))
    found = [types_after_a_step(*case) for case in cases]
    for first, second in (("16 bits", "16 bits"), *PAIRS):
        places = {"output_path": str(folder / f"{first}-{second}"), "train_iters": 4}
        steps_and_save(run_of(**places, **WAYS[first]), 2)
        steps_and_save(run_of(**places, **WAYS[second]), 4)
    return found


def test_layers_keep_8_bits_where_replicas_share_and_a_run_goes_on_without_the_flag(tmp_path: Path) -> None:
    for types in run_distributed(run_all, 2, tmp_path):
        assert types == [BF16, BF16, IN_8_BITS, IN_8_BITS]
    expected = stored_tensors(tmp_path / "16 bits-16 bits" / "checkpoint" / "iter_0000004")
    assert {tensor.dtype for tensor in expected.values()} >= {torch.bfloat16, torch.int16, torch.float32}
    for first, second in PAIRS:
        found = stored_tensors(tmp_path / f"{first}-{second}" / "checkpoint" / "iter_0000004")
        assert found.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())
