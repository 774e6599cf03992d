"""What the host waits for in a steady step: torch warns at each operation that makes it wait for the GPU."""

import warnings
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from small_runs import small_run
from training_runs import build_seeded_run

from patch.device import DeviceContext
from patch.training.step import train_step

WAITS = {"own_shards.py", "async_collectives.py"}
"""The norm; and after it the losses, which have been summed by then."""


@pytest.mark.parametrize("stage", ["none", "optimizer", "gradients"])
def test_the_host_waits_for_the_norm_alone(job: DeviceContext, stage: str) -> None:
    changes = {"precision": "bf16", "train_iters": 4, "data_parallel_sharding": stage}
    run = build_seeded_run(small_run(**changes), None, job)
    for iteration in range(2):
        train_step(run, iteration)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(run, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        run.optimizer.finish_param_sync()
        parallel_state.destroy_model_parallel()
    places = [Path(found.filename).name for found in caught if "synchronizing" in str(found.message)]
    assert set(places) <= WAITS and places.count("own_shards.py") == 1, places
