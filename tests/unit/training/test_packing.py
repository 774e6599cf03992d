"""Packed training against one sequence a row; and no sequence changes another.

A global batch holds the same conversations either way, so losses and gradient norms differ by the order of
summation only. Packing in other layouts: test_covered_layouts.py.
"""

from typing import Any

import pytest
from distributed_runner import new_job, run_distributed
from packed_runs import PACKED, PADDED, SIZES, STEPS, TalkReader, Talks, batches_of, build_untrained
from small_runs import small_run
from training_runs import CPU, build_seeded_run

from patch.config.schema import RunConfig
from patch.distributed.collectives import max_over_world
from patch.plan.flops import attended_pairs
from patch.training.step import run_schedule, train_step

TRAINED_BOUND = 3e-5
"""On the losses of three steps, near 5.6: AdamW amplifies the rounding of the first."""
FAMILIES = {"add_qkv_bias": True, "qk_layernorm": True, "window_size": "7,0"}


def trajectory(config: RunConfig) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and attended pairs of each step."""
    run = build_seeded_run(config)
    run.train_reader = TalkReader(config, run.groups.dp.rank())  # type: ignore[assignment]
    found = []
    for iteration in range(STEPS):
        result = train_step(run, iteration)
        (loss,) = max_over_world([result.loss], run.device)
        found.append((loss, result.grad_norm, result.attended_pairs))
    run.optimizer.finish_param_sync()
    new_job()
    return found


TRAINED = {
    1: {
        "padded": small_run(**PADDED),
        "packed": small_run(**PACKED),
        "packed, 1 row": small_run(**PACKED | {"micro_batch_size": 1}),
        "packed, 4 rows": small_run(**PACKED | {"micro_batch_size": 4}),
        "packed, selective": small_run(**PACKED, recompute_granularity="selective"),
        "packed, full": small_run(**PACKED, recompute_granularity="full"),
        "families padded": small_run(**PADDED, **FAMILIES),
        "families packed": small_run(**PACKED, **FAMILIES),
        "aligned packed": small_run(**PACKED, precision_align="eager"),
    },
    2: {
        "dp": small_run(dp=2, data_parallel_sharding="gradients", **PACKED),
        "pp": small_run(pp=2, **PACKED),
        "vpp": small_run(pp=2, stage=1, **PACKED),
        "vpp, full": small_run(pp=2, stage=1, recompute_granularity="full", **PACKED),
    },
}
LIKE_PADDED = [
    name for configs in TRAINED.values() for name in configs if name != "padded" and "families" not in name
]
SAME_BITS = [("packed, full", "packed"), ("packed, selective", "packed"), ("dp", "packed"), ("pp", "packed")]
SAME_BITS += [("vpp", "packed"), ("vpp, full", "packed")]


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
    "window": (1, FAMILIES),
    "tp": (2, {"tp": 2}),
    "tp, sp": (2, {"tp": 2, "sequence_parallel": True}),
    "pp": (2, {"pp": 2}),
    "vpp": (2, {"pp": 2, "stage": 1}),
    "full": (2, {"pp": 2, "recompute_granularity": "full"}),
}


def run_all(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {name: trajectory(config) for name, config in TRAINED[world_size].items()}
    for name, (size, changes) in LEAKS.items():
        if size == world_size:
            found[f"leak {name}"] = losses_by_sequence(small_run(**PACKED, **changes))
    return found


@pytest.fixture(scope="module")
def results() -> dict[str, list[Any]]:
    """By name: what each rank found."""
    found: dict[str, list[Any]] = {}
    for world_size in TRAINED:
        ranks = run_distributed(run_all, world_size)
        found |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return found


@pytest.mark.parametrize(
    ("name", "padded"),
    [
        *((name, "padded") for name in LIKE_PADDED),
        ("families packed", "families padded"),
    ],
)
def test_packed_steps_are_those_of_one_sequence_a_row(results: dict, name: str, padded: str) -> None:
    expected = results[padded][0]
    for rank in results[name]:
        assert [loss for loss, _, _ in rank] == pytest.approx(
            [loss for loss, _, _ in expected], abs=TRAINED_BOUND
        )
        assert [norm for _, norm, _ in rank] == pytest.approx([norm for _, norm, _ in expected], rel=1e-4)


@pytest.mark.parametrize(("name", "alike"), SAME_BITS)
def test_stages_replicas_and_recomputation_change_no_bit(results: dict, name: str, alike: str) -> None:
    for rank in results[name]:
        assert [step[0] for step in rank] == [step[0] for step in results[alike][0]]


@pytest.mark.parametrize("name", LEAKS)
def test_no_sequence_changes_another(results: dict, name: str) -> None:
    for rank in results[f"leak {name}"]:
        for number, (loss, beside_others) in enumerate(rank):
            assert loss == beside_others > 0, f"conversation {number}"


def test_attention_of_a_packed_step_is_counted_sequence_by_sequence(results: dict) -> None:
    lengths = [*SIZES, 4, 1]  # and the padding of two rows
    for name in ("packed", "dp", "vpp"):
        for rank in results[name]:
            assert [step[2] for step in rank] == [sum(n * (n + 1) / 2 for n in lengths)] * STEPS
    assert results["padded"][0][0][2] == 0
    assert results["families packed"][0][0][2] == attended_pairs(lengths, (7, 0))
