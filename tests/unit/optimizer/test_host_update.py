"""Chunks on the host, wherever they lie and move, updated beside backward: the bits of the plain order.

The device is simulated: its chunks are updated in NumPy, those on the host in C++, by threads of their own.
What is updated when: test_early_updates.py.
"""

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from distributed_runner import new_job, run_distributed
from optimizer_runs import (
    RULES,
    OddModel,
    RandomPolicy,
    SlowKernel,
    accumulate,
    build_optimizer,
    host_kernel,
    make_steps,
    on_host,
    take_step,
    weights_of,
)
from small_runs import HALF, small_run
from training_runs import build_seeded_run

from patch.config.choices import ZeroStage
from patch.device import MachineFacts
from patch.memory.disk import DiskMemory
from patch.memory.simulated_device import UNLIMITED, SimulatedDevice
from patch.optimizer.states.offload import Offload
from patch.plan.memory import kept_weight_bytes, staging_bytes
from patch.training.step import train_step

pytestmark = pytest.mark.long

NUM_STEPS = 20
CLIPPED, SOMETIMES, FREE = 0.01, 0.5, 0.0
"""Without clipping all that was speculated is committed, with it all is updated after backward."""
RUNS = [
    (ZeroStage.NONE, torch.float32, SOMETIMES, "fp32"),
    (ZeroStage.OPTIMIZER, torch.bfloat16, FREE, "bf16"),
    (ZeroStage.OPTIMIZER, torch.float16, CLIPPED, "fp32"),
    (ZeroStage.GRADIENTS, torch.float32, FREE, "bf16"),
    (ZeroStage.GRADIENTS, torch.bfloat16, SOMETIMES, "fp32"),
    (ZeroStage.GRADIENTS, torch.bfloat16, SOMETIMES, "SGD"),
]
RANDOM = "random"
FIXED = [(0.0, 100), (0.3, 100), (1.0, 100), (0.5, 0)]
"""The fraction on the host, and elements of a chunk, 0 where they are searched."""
MOVING = (RANDOM, 60)
"""Each rank's chunks move at random, and the host is late."""
ON_DISK, MOVING_ON_DISK = (1.0, 100, 0), (RANDOM, 60, 1000)
"""The same with so many bytes in host memory; other states are on a disk."""


def places_of(run: tuple) -> list[tuple]:
    """One of the fixed places, and the moving ones."""
    return [FIXED[RUNS.index(run) % len(FIXED)], MOVING, ON_DISK, MOVING_ON_DISK]


def train(rank: int, run: tuple, place: tuple | None, folder: Path) -> dict[str, Any]:
    """Norms and weights of steps of which some use a part of the model only, some are begun and not taken;
    step 10 begins with loaded weights."""
    zero_stage, dtype, clip_grad, moments = run
    model, offload, policy = OddModel(dtype=dtype), None, RandomPolicy(rank)
    is_random = place is not None and place[0] == RANDOM
    if place is not None:
        offload = (
            Offload(SimulatedDevice(UNLIMITED), policy, place[1], streamed=0.4)
            if is_random
            else on_host(*place[:2])
        )
        for host_bytes in place[2:]:
            offload = replace(offload, disk=DiskMemory(folder), host_state_bytes=host_bytes)
    changes = {"clip_grad": clip_grad, "reduce_bucket_size": 200, "initial_loss_scale": 1024.0}
    changes |= RULES.get(moments) or {"exp_avg_dtype": moments, "exp_avg_sq_dtype": moments}
    with host_kernel(SlowKernel(0.0, 0.005)) if is_random else nullcontext():
        optimizer = build_optimizer(model, zero_stage, offload=offload, **changes)
    norms = []
    for index, step in enumerate(make_steps(NUM_STEPS, 2, 2)):
        batches = [batch.to(dtype) for batch in step[rank]]
        model.is_short = index % 3 == 1
        optimizer.placement.apply()
        if index == 10:
            model.load_state_dict(OddModel(seed=7, dtype=dtype).state_dict())
            optimizer.reload_model_params()
        if index % 4 == 3:
            accumulate(model, optimizer, batches)
        else:
            norms.append(take_step(model, optimizer, batches))
    optimizer.finish_param_sync()
    manager = optimizer.adam.manager
    return {
        "norms": norms,
        "weights": weights_of(model),
        "moves": policy.num_moves,
        "fraction": (manager.offload_fraction, manager.size / manager.num_elements),
        "report": optimizer.report(),
    }


def run_all(rank: int, world_size: int, folder: Path) -> dict[tuple, dict[str, Any]]:
    return {
        (run, place): train(rank, run, place, folder) for run in RUNS for place in (None, *places_of(run))
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple, dict[str, Any]]]:
    return run_distributed(run_all, 2, tmp_path_factory.mktemp("disk"))


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_placement_changes_no_bit(ranks: list, run: tuple) -> None:
    for found, place in product(ranks, places_of(run)):
        expected, ours = found[run, None], found[run, place]
        assert ours["norms"] == expected["norms"] and len(ours["norms"]) == NUM_STEPS * 3 // 4
        for name, weight in expected["weights"].items():
            assert np.isfinite(weight).all() and np.array_equal(ours["weights"][name], weight), name
        fraction, of_chunk = ours["fraction"]
        assert ours["moves"] > 20 if place[0] == RANDOM else abs(fraction - place[0]) <= of_chunk
        report = ours["report"]
        assert bool(report.disk_moved_bytes) == (len(place) > 2)
        assert not place[2:] or report.host_bytes <= place[2]


def test_clipping_of_these_runs_is_what_they_say(ranks: list) -> None:
    norms = np.array(ranks[0][RUNS[0], None]["norms"])
    assert (norms > CLIPPED).all() and 0 < (norms > SOMETIMES).sum() < len(norms)


def streaming_bytes(rank: int, world_size: int) -> tuple[int, int]:
    """Bytes of the buffers of streamed states, and those in the plan."""
    changes = HALF | {"data_parallel_sharding": "optimizer", "optimizer_offload_streamed": 0.5}
    config = small_run(dp=world_size, **changes)
    updates = build_seeded_run(config).optimizer.adam.streamed_updates
    assert updates is not None
    there = [each.data.nbytes for buffer in updates._buffers for each in buffer.states.values()]
    planned, without = (staging_bytes(each, 0, cuda=True) for each in (config, small_run(dp=world_size)))
    return sum(there), planned - without


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_of_streamed_states_are_those_of_the_plan(world_size: int) -> None:
    for there, planned in run_distributed(streaming_bytes, world_size):
        assert 0 < there <= planned < 5 * there


LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "data_parallel_sharding": "gradients"},
    {"pp": 2, "recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
    {"tp": 2, "sequence_parallel": True, "untie_embeddings_and_output_weights": False},
]


def count_weights(device: SimulatedDevice, copied: list[int], copies: Sequence, after: Any) -> Any:
    """Copy to the host, and count the bytes of weights; gradients are fp32."""
    copied[-1] += sum(source.nbytes for source, _ in copies if source.dtype == torch.bfloat16)
    return device.copy_to_device(copies)


def weights_to_host(rank: int, world_size: int) -> list[tuple[list[int], int, float]]:
    """For each layout: bytes of weights that each step copies to the host, their bytes on the host and by
    the plan. Before the third step weights are loaded."""
    found = []
    for layout in LAYOUTS:
        new_job()
        config = small_run(precision="bf16", **HALF | layout)
        run, copied = build_seeded_run(config), list[int]()
        device, updates = run.optimizer.placement.device, run.optimizer.adam.host_updates
        assert isinstance(device, SimulatedDevice) and updates is not None
        with mock.patch.object(device, "copy_to_host", partial(count_weights, device, copied)):
            for step in range(4):
                copied.append(0)
                if step == 2:
                    run.optimizer.reload_model_params()
                train_step(run, step)
                run.optimizer.schedule.finish_param_sync()
        kept = 2 * sum(chunk.numel for chunk in updates._buffers.kept)
        planned = kept_weight_bytes(config, MachineFacts(0, 1), rank if "pp" in layout else 0)
        found.append((copied, kept, planned / kept))
    return found


def test_weights_stay_on_the_host_that_updates_them() -> None:
    for copied, kept, planned in itertools.chain(*run_distributed(weights_to_host, 2)):
        assert kept > 0 and copied == [kept, 0, kept, 0]
        assert 0.95 < planned < 1.05
