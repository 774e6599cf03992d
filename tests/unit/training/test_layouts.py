"""Pipeline stages, replicas and recomputation: not one bit of difference from one process.

The order of their sums is that of one process. Where it is not (TP, SP, CP, ZeRO-2, packing):
test_covered_layouts.py.
"""

from typing import Any

import pytest
from distributed_runner import run_distributed
from small_runs import small_run
from training_runs import run_training

from patch.config.schema import RunConfig
from patch.training.step import StepResult

pytestmark = pytest.mark.long

STEPS = 5
# On losses near 5.6: the two stages' sums of a tied embedding's gradient are added up last.
TIED_BOUND = 2e-6
# Measured 0.016: 8 bits have three digits (binary) after the first, bf16 seven.
FP8_BOUND = 0.04
TIED = {"untie_embeddings_and_output_weights": False}
# Embedding and loss are stages of their own.
ACCOUNTED = {
    "account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True,
}  # fmt: skip
SINGLE = {"pipeline_model_parallel_layout": "E|t|t|t|t|L"}
FLUSH = {"overlap_p2p_communication_warmup_flush": True}
GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
# Micro-batches of a step: 2 are one group of the interleaved schedule, 4 two, 5 one of three and one of two.
FOUR = {"global_batch_size": 8, "train_iters": 3}
FIVE = {"global_batch_size": 10, "train_iters": 3}
# Two processes that are neither first nor last; a group of five micro-batches and one of four.
NINE = {"num_layers": 8, "global_batch_size": 18, "train_iters": 2}


def run_of(**changes: Any) -> RunConfig:
    return small_run(**{"train_iters": STEPS} | changes)


RUNS = {
    1: {
        "one": run_of(),
        "tied": run_of(**TIED),
        "bf16": run_of(precision="bf16"),
        "fp8": run_of(precision="fp8"),
        "one-4": run_of(**FOUR),
        "one-5": run_of(**FIVE),
        "one-9": run_of(**NINE),
    },
    2: {
        "pp=2": run_of(pp=2),
        "dp=2": run_of(dp=2),
        "tp=2-sp": run_of(tp=2, sequence_parallel=True),
        "tp=2-sp-full": run_of(tp=2, sequence_parallel=True, recompute_granularity="full"),
        "tied-pp=2": run_of(pp=2, **TIED),
        "vpp=2": run_of(pp=2, stage=1),
        "vpp=2-accounted": run_of(pp=2, stage=1, **ACCOUNTED),
        "vpp=2-by-hand": run_of(pp=2, pipeline_model_parallel_layout="E|ttt|t|L", **TIED),
        "vpp=2-full": run_of(pp=2, stage=1, recompute_granularity="full"),
        "vpp=2-4": run_of(pp=2, stage=1, **FOUR),
        "vpp=2-5": run_of(pp=2, stage=1, **FIVE),
        "vpp=2-5-flush": run_of(pp=2, stage=1, **FLUSH, **FIVE, **{GROUP: 5}),
        "tied-vpp=2": run_of(pp=2, stage=1, **TIED),
        "fp8-vpp=2": run_of(precision="fp8", pp=2, stage=1),
    },
    3: {
        "pp=3": run_of(pp=3),
        "tied-pp=3": run_of(pp=3, **TIED),
        "pp=3-vpp=2-waiting": run_of(pp=3, **SINGLE, **FOUR, overlap_p2p_communication=False),
        "pp=3-vpp=2-flush": run_of(pp=3, **SINGLE, **FOUR, **FLUSH),
        "pp=3-by-hand": run_of(pp=3, pipeline_model_parallel_layout="E|t*3|tL", recompute_granularity="full"),
    },
    4: {
        "tp=2-pp=2": run_of(tp=2, pp=2),
        "tp=2-pp=2-reversed": run_of(tp=2, pp=2, rank_order="pp-tp"),
        "pp=2-dp=2-reversed": run_of(pp=2, dp=2, rank_order="tp-cp-ep-pp-dp"),
        "pp=4-vpp=2-9": run_of(pp=4, stage=1, **NINE),
    },
}


@pytest.fixture(scope="module")
def results() -> dict[str, list[list[StepResult]]]:
    """By run: the results of each rank."""
    found = {}
    for world_size, configs in RUNS.items():
        ranks = run_distributed(run_training, world_size, configs, timeout_s=240)
        found |= {name: [rank[name] for rank in ranks] for name in configs}
    return found


def _losses(rank_results: list[StepResult]) -> list[float]:
    return [result.loss for result in rank_results]


def test_loss_falls_and_clipping_triggers(results: dict) -> None:
    (one,) = results["one"]
    assert one[STEPS - 1].loss < one[0].loss
    assert max(result.grad_norm for result in one) > 1.0


@pytest.mark.parametrize(
    "name,alike",
    [
        ("pp=2", "one"),
        ("pp=3", "one"),
        ("dp=2", "one"),
        ("vpp=2", "one"),
        ("vpp=2-4", "one-4"),
        ("vpp=2-5", "one-5"),
        ("pp=4-vpp=2-9", "one-9"),
        ("tied-vpp=2", "tied-pp=2"),
        ("fp8-vpp=2", "fp8"),
        ("vpp=2-accounted", "one"),
        ("vpp=2-by-hand", "tied-pp=2"),
        ("pp=3-by-hand", "one"),
        ("vpp=2-5-flush", "one-5"),
        ("pp=3-vpp=2-waiting", "one-4"),
        ("pp=3-vpp=2-flush", "one-4"),
        ("pp=2-dp=2-reversed", "one"),
        ("tp=2-pp=2-reversed", "tp=2-pp=2"),
    ],
)
def test_losses_are_bitwise_alike(results: dict, name: str, alike: str) -> None:
    for rank_results in results[name]:
        assert _losses(rank_results) == _losses(results[alike][0])


@pytest.mark.parametrize(
    "name,alike",
    [("tp=2-sp-full", "tp=2-sp"), ("vpp=2-full", "one")],
)
def test_recomputation_changes_no_bit(results: dict, name: str, alike: str) -> None:
    assert _losses(results[name][0]) == _losses(results[alike][0])


@pytest.mark.parametrize("name", ["tied-pp=2", "tied-pp=3"])
def test_tied_embeddings_train_alike_on_one_stage_and_on_two(results: dict, name: str) -> None:
    assert _losses(results[name][0]) == pytest.approx(_losses(results["tied"][0]), abs=TIED_BOUND)


def test_bf16_trains_close_to_fp32(results: dict) -> None:
    assert _losses(results["bf16"][0]) == pytest.approx(_losses(results["one"][0]), abs=0.005)


def test_fp8_trains_close_to_bf16(results: dict) -> None:
    assert _losses(results["fp8"][0]) == pytest.approx(_losses(results["bf16"][0]), abs=FP8_BOUND)
