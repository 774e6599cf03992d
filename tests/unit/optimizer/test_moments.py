"""Moments in fewer bytes: the same bits in every layout and placement, and after every resume.

A chain of layouts carries one state on: each loads what the one before saved, makes two updates from
gradients that are a function of the weights, element by element, and saves. The oracle is one process that
makes the same updates, each time from its own files.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from optimizer_runs import BUCKET, WIDTH, Layers, RandomPolicy, build_optimizer, take_step
from small_runs import HALF, small_run
from training_runs import build_seeded_run, stored_tensors

from patch.checkpoint import load_checkpoint, save_checkpoint
from patch.checkpoint.folder import iteration_folder
from patch.config.choices import ZeroStage
from patch.errors import ConfigError
from patch.memory.simulated_device import UNLIMITED, SimulatedDevice
from patch.model import sharded_weights
from patch.optimizer import OptimizerConfig, OverlappedDistributedOptimizer
from patch.optimizer.states.offload import Offload
from patch.optimizer.trainable_params import check_rows

LR = 1e-2
KINDS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "8bit", "precision": "bf16"}
SHAPE = {"hidden_size": 128, "ffn_hidden_size": 384, "num_attention_heads": 4, "kv_channels": 64}
CHAIN: list[dict[str, Any]] = [
    {"dp": 4, "data_parallel_sharding": "gradients", "reduce_bucket_size": 9000},
    {"tp": 2, "dp": 2, "data_parallel_sharding": "optimizer", "sequence_parallel": True, **HALF},
    {"pp": 2, "dp": 2, "stage": 1, "data_parallel_sharding": "none", "reduce_bucket_size": 5000},
    {"tp": 2, "pp": 2, "optimizer_offload_chunk_size": 1000, **HALF, "optimizer_offload_fraction": 1.0},
    {"dp": 4, "data_parallel_sharding": "gradients", "num_distributed_optimizer_instances": 2},
]  # fmt: skip


def update_twice(optimizer: OverlappedDistributedOptimizer) -> None:
    """From gradients that depend on nothing but the weights."""
    for _ in range(2):
        for shard in optimizer.adam.shards:
            shard.grad.copy_(shard.param.float() * 3.7 - 0.01)
        optimizer.adam.start_step(LR, 1.0)
        optimizer.schedule.update(LR, 1.0)
        optimizer.finish_param_sync()


def carry(rank: int, world_size: int, root: Path, layouts: list[dict[str, Any]]) -> None:
    """Carry states through layouts."""
    for iteration, layout in enumerate(layouts):
        run = build_seeded_run(small_run(**SHAPE, **KINDS, **layout))
        weights = sharded_weights(run.stages)
        if iteration:
            states = run.optimizer.sharded_state_dict(weights, is_loading=True)
            load_checkpoint(root, iteration - 1, {"model": weights, "optimizer": states})
            run.optimizer.load_common_state_dict({"optimizer_steps": 2 * iteration, "loss_scale": {}})
        update_twice(run.optimizer)
        state = {"model": weights, "optimizer": run.optimizer.sharded_state_dict(weights)}
        save_checkpoint(root, iteration, state, {"iteration": iteration})
        new_job()


@pytest.mark.long
def test_no_layout_placement_or_resume_changes_a_bit(tmp_path: Path) -> None:
    run_distributed(carry, 4, tmp_path / "chain", CHAIN, timeout_s=300)
    run_distributed(carry, 1, tmp_path / "one", [{}] * len(CHAIN), timeout_s=300)
    for iteration, layout in enumerate(CHAIN):
        sides = (iteration_folder(tmp_path / side, iteration) for side in ("chain", "one"))
        ours, expected = map(stored_tensors, sides)
        assert ours.keys() == expected.keys() and any("exp_avg_sq_scale" in key for key in ours)
        different = [key for key in ours if not torch.equal(ours[key], expected[key])]
        assert not different, (layout, different)


def train_moved(rank: int, world_size: int) -> list[list[float]]:
    """Weights of runs whose chunks stay on the device or move, with speculation and without."""
    found = []
    settings = {"reduce_bucket_size": BUCKET, "exp_avg_dtype": "8bit", "exp_avg_sq_dtype": "8bit"}
    for is_moved, clip_grad in ((False, 0.0), (True, 0.0), (False, 1e-3), (True, 1e-3)):
        torch.manual_seed(0)
        model, policy = Layers(torch.bfloat16), RandomPolicy(0)
        offload = Offload(SimulatedDevice(UNLIMITED), policy, 1000, streamed=0.5) if is_moved else None
        optimizer = build_optimizer(model, ZeroStage.NONE, offload=offload, clip_grad=clip_grad, **settings)
        for index in range(8):
            optimizer.placement.apply()
            take_step(model, optimizer, [torch.ones(3, WIDTH, dtype=torch.bfloat16) * (index + 1)])
        optimizer.finish_param_sync()
        assert not is_moved or policy.num_moves > 10
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist())
    return found


def test_eight_bits_that_move_and_are_updated_beside_backward_keep_their_bits() -> None:
    (weights,) = run_distributed(train_moved, 1)
    assert weights[0] == weights[1] and weights[2] == weights[3] != weights[0]


def test_a_row_that_ends_within_a_block_is_refused() -> None:
    model = torch.nn.Linear(60, 64, bias=False)
    with pytest.raises(ConfigError, match=r"8bit.* multiples of 64: a row of weight has 60 elements") as told:
        check_rows(list(model.named_parameters()), OptimizerConfig(lr=LR, exp_avg_sq_dtype="8bit"))
    assert told.value.field == "exp_avg_sq_dtype"
