"""Runs of `llama-patch prove` in a test's processes, one after the other, with or without wrong messages."""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from distributed_runner import new_job, rejoin, run_distributed
from wrong_messages import Fault, Messages

from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.errors import TrainingError
from patch.training import HOOKS, worker
from patch.training.hooks.hook import TrainerHook
from toolkits.prove.compare import Difference, compare
from toolkits.prove.made import make_data
from toolkits.prove.shrink import STEPS, Shrunk, shrink
from toolkits.prove.worker import EVIDENCE, evidence


def shrunk(config: RunConfig, folder: Path, *, is_for_gpus: bool = False) -> Shrunk:
    """Return the shrunk run that prove makes of a run on eight processes."""
    return shrink(config, MachineFacts(cuda_devices=0, cpu_cores=2), 8, folder, is_for_gpus=is_for_gpus)


def in_folder(config: RunConfig, folder: Path) -> RunConfig:
    return replace(config, checkpoint=replace(config.checkpoint, output_path=str(folder)))


def train(rank: int, world_size: int, runs: list[tuple[RunConfig, Fault | None]]) -> list[set[Fault]]:
    """Train each run; return its possible message faults. A run that stops has noticed its fault itself."""
    HOOKS[:] = [evidence]
    worker.LossPlot = lambda output: TrainerHook()  # type: ignore  # the plot takes half of the time
    found = []
    for config, fault in runs:
        with Messages(fault) as messages:
            try:
                worker.run(config)
                rejoin()
            except TrainingError:
                assert fault is not None, "what is right goes on"
                new_job()
        found.append(messages.sites)
    return found


def train_all(runs: list[tuple[RunConfig, Fault | None]]) -> list[set[Fault]]:
    """Train all runs, which have the same number of processes; return the possible faults of each."""
    ranks = run_distributed(train, runs[0][0].world_size, runs, timeout_s=1000)
    return [set().union(*each) for each in zip(*ranks, strict=True)]


def prove_all(small: list[Shrunk]) -> dict[int, list[Difference]]:
    """Return number of a run -> its differences, without runs that agree."""
    for each in small:
        make_data(Path(each.one.checkpoint.output_path).with_name("made"), each.one)
    runs = sorted((run for each in small for run in each[:2]), key=lambda run: run.world_size)
    for _, same in groupby(runs, key=lambda run: run.world_size):
        train_all([(run, None) for run in same])
    found = {number: differences(each.layout, each.one) for number, each in enumerate(small)}
    return {number: each for number, each in found.items() if each}


def differences(layout: RunConfig, one: RunConfig) -> list[Difference]:
    file = Path(layout.checkpoint.output_path) / EVIDENCE
    if not file.exists() or str(STEPS) not in json.loads(file.read_text()):
        return [Difference("the run stopped", 1, 0)]
    return compare(layout, one, range(1, STEPS + 1)).differences
