"""No sequence of a packed row changes another. Beside one sequence a row: test_covered_layouts.py."""

from typing import Any

import pytest
from distributed_runner import new_job, run_distributed
from packed_runs import PACKED, SIZES, Talks, batches_of, build_untrained
from small_runs import small_run
from training_runs import CPU

from patch.config.schema import RunConfig
from patch.distributed.collectives import max_over_world
from patch.training.step import run_schedule

FAMILIES = {"add_qkv_bias": True, "qk_layernorm": True, "window_size": "7,0"}


def losses_by_sequence(config: RunConfig) -> list[list[float]]:
    """The loss of each conversation: in its row, and in it when all other conversations are others."""
    run = build_untrained(config)
    found = []
    for number in range(len(SIZES)):
        losses = []
        for seed in (0, 1):
            talks = Talks(seed, learned=[number])
            talks.take(number, Talks(0))
            parts = run_schedule(run, batches_of(talks, config), 1.0, loss_scale=None)
            losses.append(max_over_world([float(sum(parts))], CPU.device)[0])
        found.append(losses)
    new_job()
    return found


LEAKS = {
    "one": (1, {}),
    "aligned": (1, {"precision_align": "eager"}),
    "window": (1, FAMILIES),
    "tp": (2, {"tp": 2}),
    "tp, sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp": (2, {"pp": 2}),
    "vpp": (2, {"pp": 2, "stage": 1}),
    "full": (2, {"pp": 2, "recompute_granularity": "full"}),
}


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    of_size = {name: changes for name, (size, changes) in LEAKS.items() if size == world_size}
    return {name: losses_by_sequence(small_run(**PACKED, **changes)) for name, changes in of_size.items()}


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    """By name: what each rank found."""
    found: dict[str, list[Any]] = {}
    for world_size in (1, 2):
        ranks = run_distributed(run_all, world_size)
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return found


@pytest.mark.parametrize("name", LEAKS)
def test_no_sequence_changes_another(results: dict, name: str) -> None:
    for rank in results[name]:
        for number, (loss, beside_others) in enumerate(rank):
            assert loss == beside_others > 0, f"conversation {number}"
