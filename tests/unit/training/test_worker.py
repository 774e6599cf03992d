"""A worker enters a run's folder only where no other run writes it, whoever started it."""

import os
from pathlib import Path

import pytest
from distributed_runner import run_distributed
from small_runs import small_run

from patch.config.schema import RunConfig
from patch.errors import ConfigError
from patch.storage.lock import hold_run


def enter(rank: int, world_size: int, config: RunConfig) -> str:
    from patch.training.worker import run

    with pytest.raises(ConfigError) as refused:
        run(config)
    return str(refused.value)


def test_workers_of_a_second_run_all_end_before_anything_is_written(tmp_path: Path) -> None:
    """As a torchrun starts them, or the launchers of several machines: nobody has looked before."""
    config = small_run(dp=2, output_path=str(tmp_path / "out"), train_data_path=str(tmp_path / "none.json"))
    with hold_run(tmp_path / "out"):
        first, second = run_distributed(enter, 2, config)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    assert f"out is being written by process {os.getpid()} on " in first
    assert second == f"rank 0: {first}"
