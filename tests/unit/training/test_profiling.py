"""--profile: each rank's trace names phases, buckets, chunks and waits in order; off it does nothing."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from torch.profiler import ProfilerActivity, profile
from training_runs import build_seeded_run

from patch.checks.run_length import profiled_steps
from patch.compat.torch_internals import Phases, region
from patch.config.schema import RunConfig
from patch.training.hooks.hook import Record, StepProfile, TrainerHook
from patch.training.setup import Run
from patch.training.trainer import Trainer

PROFILED = range(2, 4)
PHASES = ("forward", "backward", "reduction", "data reading", "update")


class Watching(TrainerHook):
    """Keeps the losses, and sees whether messages are under way while a profiler stops: that would crash."""

    def __init__(self, run: Run, is_profiled: bool) -> None:
        self._run, self._is_profiled, self.losses = run, is_profiled, list[float]()

    def on_step(self, iteration: int, seconds: float) -> None:
        if self._is_profiled and iteration == PROFILED[-1]:
            assert self._run.optimizer.schedule.is_settled

    def on_log(self, record: Record) -> None:
        self.losses.append(record["loss"])


def train(rank: int, world_size: int, config: RunConfig) -> list[list[float]]:
    """The losses of a run with a profile, and of one without."""
    found, folder = [], Path(config.checkpoint.output_path)
    for is_profiled in (True, False):
        checkpoint = replace(config.checkpoint, output_path=str(folder / str(is_profiled)))
        run = build_seeded_run(replace(config, checkpoint=checkpoint))
        hooks: list[TrainerHook] = [Watching(run, is_profiled)]
        if is_profiled:
            settle = run.optimizer.finish_param_sync
            hooks.insert(0, StepProfile(folder, PROFILED, rank, 0, is_cuda=False, settle=settle))
        assert Trainer(run, hooks).train() == 0
        found.append(hooks[-1].losses)
        new_job()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run's folder, with the traces of two ranks at ZeRO-2 and half of the states on the host."""
    output = tmp_path_factory.mktemp("run")
    config = small_run(
        dp=2, num_layers=2, train_iters=4, save_interval=9, output_path=str(output), async_save=False,
        eval_interval=0, optimizer_offload_policy="static", optimizer_offload_fraction=0.5,
        optimizer_offload_chunk_size=20000, reduce_bucket_size=30000, global_batch_size=8,
        overlapped_distributed_optimizer=True, use_distributed_optimizer=True,
    )  # fmt: skip
    for profiled, plain in run_distributed(train, 2, config):
        assert profiled == plain and len(plain) == 4
    return output


def named(folder: Path, rank: int) -> list[dict]:
    """The named regions of a rank's trace, in order."""
    text = gzip.decompress((folder / "log" / "traces" / f"rank_{rank}.json.gz").read_bytes())
    events = [event for event in json.loads(text)["traceEvents"] if event.get("cat") == "user_annotation"]
    return sorted(events, key=lambda event: event["ts"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trace_names_the_parts_of_its_steps_in_order(folder: Path, rank: int) -> None:
    events = named(folder, rank)
    steps = [event for event in events if event["name"].startswith("step ")]
    assert [event["name"] for event in steps] == ["step 2", "step 3"]
    begin, end = steps[1]["ts"], steps[1]["ts"] + steps[1]["dur"]
    names = [event["name"] for event in events if begin <= event["ts"] < end]
    phases = [name for name in names if name in PHASES]
    assert phases == [*["forward", "backward"] * 2, "reduction", "data reading", "reduction", "update"]
    reduced = [name for name in names if name.endswith("reduce-scatter")]
    count = len(reduced) // 2  # two micro-batches
    assert count > 2 and reduced == [f"bucket {index} reduce-scatter" for index in range(count)] * 2
    in_backward = names[: names.index("reduction")]
    assert sum(name in reduced for name in in_backward) > count, "they begin before backward has ended"
    gathered = [name for name in names[names.index("update") :] if name.endswith("all-gather")]
    assert gathered[0] == f"bucket {count - 1} all-gather" and set(gathered) <= set(
        f"bucket {index} all-gather" for index in range(count)
    )
    assert "wait" in names and "wait for the gradient norm" in names
    # The host has a thread of its own, which may end its work of a step after the step.
    threads = {event["name"]: event["tid"] for event in events}
    assert {"chunk 0 to host", "chunk 0 update", "chunk 0 to device"} <= threads.keys()
    assert threads["chunk 0 update"] != threads["step 2"] == threads["backward"]


def test_nothing_is_recorded_while_nobody_profiles() -> None:
    assert region("bucket %d", 1) is region("other")  # no object, and no text is made
    phases = Phases()
    phases.begin("forward")
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        phases.begin("backward")
        with region("bucket %d of %s", 3, "all"):
            torch.ones(1)
        phases.end()
    found = {event.name for event in recorded.events()}
    assert {"backward", "bucket 3 of all"} <= found and "forward" not in found


def test_a_resumed_run_records_the_steps_that_are_left(tmp_path: Path) -> None:
    hook = StepProfile(tmp_path, profiled_steps("3:4"), 7, 3, is_cuda=False, settle=lambda: None)
    with region("step 4"):
        torch.ones(2).sum()
    hook.close()
    text = gzip.decompress((tmp_path / "log" / "traces" / "rank_7.json.gz").read_bytes())
    assert "step 4" in text.decode()
    over = StepProfile(tmp_path / "none", range(3, 5), 0, 4, is_cuda=False, settle=lambda: None)
    over.on_step(5, 1.0)
    over.close()
    assert not (tmp_path / "none").exists()
