"""Losses and gradients that are not finite: skipped or stopped for, with the samples and ranks named."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from training_runs import Records, build_seeded_run, digests, messages_from

from patch.config.schema import RunConfig
from patch.errors import TrainingError
from patch.training.guards.non_finite import MOST_SKIPS
from patch.training.setup import Run
from patch.training.step import train_step
from patch.training.trainer import Trainer

SIZES = {"dp": 2, "micro_batch_size": 2, "global_batch_size": 8, "num_layers": 1}
"""Two micro-batches a rank; step 3 has the samples 16 to 23, those of rank 1's second one are 22 and 23."""


def spoil_loss(run: Run, is_bad: Callable[[int], bool]) -> None:
    """Make the losses of micro-batch number n of this rank NaN, counted from 0 over all steps."""
    count = iter(range(10**6))
    run.stages[0].register_forward_hook(lambda *_: _[2] * math.nan if is_bad(next(count)) else None)


def spoil_gradient(run: Run, is_bad: Callable[[int], bool]) -> None:
    """Make one gradient of micro-batch number n infinite, repetitions counted."""
    count = iter(range(10**6))
    norm = run.stages[0].decoder.final_layernorm.weight
    norm.register_hook(lambda gradient: gradient * math.inf if is_bad(next(count)) else None)


def add_infinity(run: Run, is_bad: Callable[[int], bool]) -> None:
    """A constant is added to the loss, so no gradient is touched."""
    run.stages[0].register_forward_hook(lambda *_: _[2] + torch.full((), math.inf))


def run_trainer(run: Run) -> tuple[list[int], str]:
    """What metrics say of skipped steps, and the error that ended the run."""
    records, error = Records(), ""
    run.data.valid_readers = {}
    try:
        Trainer(run, [records]).train()
    except TrainingError as failure:
        error = str(failure)
    return [record["skipped"] for record in records.records], error


def config_of(folder: str, name: str, **changes: Any) -> RunConfig:
    return small_run(**{**SIZES, "train_iters": 5, "output_path": f"{folder}/{name}", **changes})


def spoiled_runs(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """By fault: what metrics say, the error, weights and states, and warnings."""
    found: dict[str, Any] = {}
    lines = messages_from("WARNING")

    def trained(name: str, spoil: Callable[..., None], is_bad: Callable[[int], bool], **changes: Any) -> None:
        lines.clear()
        run = build_seeded_run(config_of(folder, name, **changes))
        run.data.sample_place = "rows.json: row {}".format
        spoil(run, is_bad)
        found[name] = (*run_trainer(run), digests(run), lines[:])
        new_job()

    skip = {"on_non_finite": "skip", "data_parallel_sharding": "gradients"}
    trained("loss", spoil_loss, lambda number: rank == 1 and number == 5, **skip)
    # Step 3 is micro-batches 4 and 5, its repetition 6 and 7.
    trained("gradient", spoil_gradient, lambda number: rank == 0 and number in (5, 7), **skip)
    trained("once", spoil_gradient, lambda number: rank == 0 and number == 5)
    many = {"on_non_finite": "skip", "train_iters": 2 * MOST_SKIPS}
    trained("many", spoil_loss, lambda number: number >= 4 and number not in (10, 11), **many)
    trained("infinite", add_infinity, lambda number: True)
    run = build_seeded_run(config_of(folder, "oracle", **skip))
    for iteration in (0, 1, 3, 4):
        run.data.upcoming = None
        train_step(run, iteration)
    found["oracle"] = digests(run)
    return found


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_distributed(spoiled_runs, 2, str(tmp_path_factory.mktemp("runs")))


def test_skipped_step_leaves_the_run_as_if_it_had_not_been_and_names_ranks_and_samples(spoiled: list) -> None:
    for rank in spoiled:
        for fault in ("loss", "gradient"):
            assert rank[fault][:3] == ([0, 0, 1, 0, 0], "", rank["oracle"])
    (loss,), (gradient,) = (spoiled[0][fault][3] for fault in ("loss", "gradient"))
    assert "step 3: gradient norm nan, expected a finite number" in loss
    assert "rank(s) 1, of sample(s) 22 (rows.json: row 22), 23 (rows.json: row 23)" in loss
    assert "all losses are finite, the gradients are not on rank(s) 0; samples 16 (" in gradient


def test_run_stops_by_default_for_infinite_losses_and_after_too_many_skips(spoiled: list) -> None:
    """Step 6 of many is a good one, so that the count begins again."""
    for rank in spoiled:
        (skipped, once, *_), (many_skipped, many, *_) = rank["once"], rank["many"]
        assert skipped == [0, 0] and "the weights are those of the step before" in once.lower()
        assert "step 3: gradient norm" in once and "a fault that does not repeat" in once
        assert many_skipped == [0, 0, 1, 1, 1, 0, *[1] * (MOST_SKIPS - 1)]
        assert f"step {6 + MOST_SKIPS}: " in many and f"step {MOST_SKIPS} in a row" in many
        infinite = rank["infinite"][1]
        assert infinite.startswith("step 1: loss") and "samples: 0 (rows.json: row 0), 1 (" in infinite
