"""Runs of `llama-patch prove` in a test's processes, one after the other, with wrong messages or without."""

from dataclasses import replace
from pathlib import Path

from distributed_runner import rejoin, run_distributed
from wrong_messages import Fault, Messages

from patch.config.schema import RunConfig
from patch.device import MachineFacts
from patch.training import HOOKS
from patch.training.worker import run
from toolkits.prove.compare import Comparison, compare
from toolkits.prove.made import make_data
from toolkits.prove.shrink import STEPS, Shrunk, shrink
from toolkits.prove.worker import evidence

HERE = MachineFacts(cuda_devices=0, cpu_cores=2)


def small(config: RunConfig, folder: Path, most: int = 8) -> Shrunk:
    """What prove makes of a run, with its data."""
    found = shrink(config, HERE, most, folder, is_for_gpus=False)
    make_data(folder / "made", found.one)
    return found


def in_folder(config: RunConfig, folder: Path) -> RunConfig:
    return replace(config, checkpoint=replace(config.checkpoint, output_path=str(folder)))


def train(rank: int, world_size: int, runs: list[tuple[RunConfig, Fault | None]]) -> list[set[Fault]]:
    """Train each; the faults that its messages can have."""
    HOOKS[:] = [evidence]
    found = []
    for config, fault in runs:
        with Messages(fault) as messages:
            run(config)
        found.append(messages.sites)
        rejoin()
    return found


def run_all(runs: list[tuple[RunConfig, Fault | None]], timeout_s: int = 1000) -> list[set[Fault]]:
    """Train all of them, which have as many processes, and return what each rank's messages can have wrong."""
    ranks = run_distributed(train, runs[0][0].world_size, runs, timeout_s=timeout_s)
    return [set().union(*each) for each in zip(*ranks, strict=True)]


def compared(layout: RunConfig, one: RunConfig) -> Comparison:
    return compare(layout, one, range(1, STEPS + 1))
