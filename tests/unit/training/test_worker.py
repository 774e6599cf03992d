"""A worker is the only writer of a run's folder; the launcher knows its exit code before its end."""

import faulthandler
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from patch.config.schema import RunConfig
from patch.errors import ConfigError, PatchError
from patch.launch.worker_process import read_worker_exit
from patch.storage.lock import hold_run
from patch.training.worker import run


def enter(rank: int, world_size: int, config: RunConfig) -> list[str]:
    """The errors of runs with different recomputation and seeds on the ranks, and of one with other paths."""
    chosen = replace(config, training=replace(config.training, recompute_granularity=["full", None][rank]))
    seeds = replace(config, training=replace(config.training, seed=rank))
    elsewhere = replace(config, data=replace(config.data, cache_dir=f"cache{rank}"))
    messages = []
    for tried in (chosen, seeds, elsewhere):
        with pytest.raises(ConfigError) as refused:
            run(tried)
        messages.append(str(refused.value))
        new_job()
    return messages


def test_workers_of_a_second_run_all_end_before_anything_is_written(tmp_path: Path) -> None:
    """Workers of torchrun, or of launchers on several machines: no launcher has checked the folder before."""
    config = small_run(dp=2, output_path=str(tmp_path / "out"), train_data_path=str(tmp_path / "none.json"))
    with hold_run(tmp_path / "out"):
        (*differ, first), (*also_differ, second) = run_distributed(enter, 2, config)
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
    assert f"out is being written by process {os.getpid()} on " in first
    assert second == f"rank 0: {first}"
    assert differ == also_differ, "without a message, one would wait for the other"
    assert (
        "got full on rank 0 and none on rank 1" in differ[0]
        and "got 0 on rank 0 and 1 on rank 1" in differ[1]
    )


def fail(rank: int, world_size: int, output: str) -> int:
    """The code of a run without a tokenizer."""
    with pytest.raises(PatchError) as caught:
        run(small_run(output_path=output, train_data_path=__file__))
    faulthandler.cancel_dump_traceback_later()
    assert dist.is_initialized(), "it waits for no other rank"
    return caught.value.exit_code


def test_worker_that_fails_announces_its_code_and_that_a_restart_would_not_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the error file of torch's agent, in a form that torch's own reader takes."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    (code,) = run_distributed(fail, 1, str(tmp_path / "out"))
    reply = read_worker_exit(str(file))
    assert (reply.exit_code, reply.may_restart) == (code, False)
    theirs = ProcessFailure(local_rank=0, pid=1, exitcode=code, error_file=str(file))
    assert theirs.message == reply.message and "tokenizer" in reply.message
