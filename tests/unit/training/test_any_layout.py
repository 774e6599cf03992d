"""A checkpoint of any layout is loaded at any other: the same bits on disk, the same losses from there on.

The run is carried through a chain of layouts. Each loads what the layout before saved, saves it again, and
trains on. What they saved is read into whole tensors by torch's own DCP, in one process.
"""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import HALF, ON_DISK, ON_HOST, ZERO_3, small_run
from training_runs import build_seeded_run, save, stored_tensors

from patch.distributed.collectives import max_over_world
from patch.training.run_state import Progress, find_progress, resume
from patch.training.step import train_step

pytestmark = pytest.mark.long

DONE, STEPS = 2, 4
# Tensor and context parallelism round sums differently: on losses near 5.6, or of bf16.
BOUNDS = {"fp32": 5e-6, "bf16": 0.01}
LENGTHS = {"global_batch_size": 8, "train_iters": STEPS, "max_padding_length": 16, "seq_length": 16}


class Place(NamedTuple):
    """A layout of the chain and the number of its processes."""

    processes: int
    changes: dict[str, Any]
    is_bitwise: bool = True
    """Whether its sums have the order of one process."""


BY_HAND = "pipeline_model_parallel_layout"
NONE, ZERO_1, ZERO_2 = ({"data_parallel_sharding": level} for level in ("none", "optimizer", "gradients"))
BOTH = {"tp": 2, "cp": 2, "rank_order": "cp-tp", "cp_comm_type": "p2p"}
INTERLEAVED = {"pp": 2, "stage": 1, "cp": 2, "cp_comm_type": "a2a"}
CHAIN = {
    "one": Place(1, {}),
    "TP x PP, interleaved by hand, SP": Place(
        4, {"tp": 2, "pp": 2, BY_HAND: "Et|tt|t|L", "sequence_parallel": True}, False
    ),
    "DP, ZeRO-2, half offloaded": Place(4, {"dp": 4, "reduce_bucket_size": 9000, **ZERO_2, **HALF}),
    "TP x DP, replicated": Place(4, {"tp": 2, "dp": 2, **NONE}, False),
    "PP x DP, accounted, ZeRO-3": Place(
        4, {"pp": 2, "dp": 2, "account_for_loss_in_pipeline_split": True, **ZERO_3}, False
    ),
    "TP x DP, ZeRO-3, half offloaded": Place(4, {"tp": 2, "dp": 2, **ZERO_3, **HALF}, False),
    "TP x CP in the other order, ZeRO-2": Place(4, BOTH | ZERO_2, False),
    "PP x CP, interleaved, half on disk": Place(4, INTERLEAVED | ZERO_1 | ON_DISK, False),
    "TP x DP, on the host": Place(4, {"tp": 2, "dp": 2, "sequence_parallel": True, **ON_HOST}, False),
    "PP3, by hand": Place(3, {"pp": 3, BY_HAND: "E|ttt|tL"}),
    "one again, on the host": Place(1, {"reduce_bucket_size": 50_000, **ON_HOST}),
}


def go_through(rank: int, world_size: int, root: Path, names: list[str], before: str | None) -> dict:
    """By layout: the losses of its further steps, and how many samples it found consumed."""
    found = {}
    for name in names:
        for precision in BOUNDS:
            config = small_run(**CHAIN[name].changes, **LENGTHS, precision=precision, seed=1234)
            run = build_seeded_run(config)
            consumed = 0
            if before is None:
                for iteration in range(DONE):
                    train_step(run, iteration)
            else:
                progress = find_progress(root / before / precision)
                resume(root / before / precision, progress, run.stages, run.optimizer, seed=1234)
                consumed = progress.consumed_samples
            save(root / name / precision, Progress(DONE, 8 * DONE), run.stages, run.optimizer)
            losses = [train_step(run, iteration).loss for iteration in range(DONE, STEPS)]
            found[name, precision] = (max_over_world(losses, run.device), consumed)
            run.optimizer.finish_param_sync()  # the gathers of a late host belong to this job
            new_job()
        before = name
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    root, found, before = tmp_path_factory.mktemp("chain"), {}, None
    for processes, group in itertools.groupby(CHAIN, key=lambda name: CHAIN[name].processes):
        names = list(group)
        found |= run_distributed(go_through, processes, root, names, before, timeout_s=200)[0]
        before = names[-1]
    return root, found


@pytest.mark.parametrize("precision", BOUNDS)
def test_weights_and_states_are_bitwise_the_same_after_every_layout(results, precision) -> None:
    root, _ = results
    expected = stored_tensors(root / "one" / precision / "iter_0000002")
    states = {key.split(".")[2] for key in expected if key.startswith("optimizer.state.")}
    assert {"exp_avg", "exp_avg_sq"} <= states
    for name in list(CHAIN)[1:]:
        found = stored_tensors(root / name / precision / "iter_0000002")
        assert found.keys() == expected.keys(), name
        assert [key for key in expected if not torch.equal(found[key], expected[key])] == [], name


@pytest.mark.parametrize("precision", BOUNDS)
@pytest.mark.parametrize("name", list(CHAIN)[1:])
def test_further_steps_are_those_of_the_unbroken_run(results, name, precision) -> None:
    _, found = results
    unbroken, (losses, consumed) = found["one", precision][0], found[name, precision]
    assert consumed == 8 * DONE
    if CHAIN[name].is_bitwise and precision == "fp32":
        assert losses == unbroken
    else:
        assert losses == pytest.approx(unbroken, abs=BOUNDS[precision])
