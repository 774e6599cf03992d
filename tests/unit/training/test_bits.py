"""No bit of a run depends on the place of stages, replicas, buckets and states, or on the order of messages.

Each run is compared with one whose sums have the same order. Where the order is another one (TP, SP, CP,
ZeRO-2, packing): test_covered_layouts.py. A small model against oracles: tests/unit/optimizer.
"""

from typing import Any, NamedTuple

import pytest
from distributed_runner import new_job, run_distributed
from small_runs import HALF, ON_DISK, ON_HOST, ZERO_3, small_run
from training_runs import build_seeded_run, digest_of, digests, train_run

from patch.checks.layout import SPLIT_ACCOUNTING_FLAGS
from patch.config.schema import RunConfig

pytestmark = pytest.mark.long

EVERYTHING = ("losses", "norms", "weights", "states")
TIED = {"untie_embeddings_and_output_weights": False}
FLUSH = {"overlap_p2p_communication_warmup_flush": True}
BY_HAND = "pipeline_model_parallel_layout"
# Micro-batches of a step: 2 are one group of the interleaved schedule, 4 two, 5 one of three and one of two.
FOUR, FIVE = {"global_batch_size": 8}, {"global_batch_size": 10}
# Two processes that are neither first nor last; a group of five micro-batches and one of four.
NINE = {"num_layers": 8, "global_batch_size": 18, "train_iters": 2}
EIGHT_ROWS = {"global_batch_size": 8, "reduce_bucket_size": 9000}
NONE, ZERO_1, ZERO_2 = (
    EIGHT_ROWS | {"data_parallel_sharding": level} for level in ("none", "optimizer", "gradients")
)
SHARDED = EIGHT_ROWS | ZERO_3
"""Norms are sums over other buckets: the last bit of a float64 may differ."""
BF16_GRADIENTS = {"precision": "bf16", "main_grads_dtype": "bf16"}
INSTANCES = {"dp": 4, "num_distributed_optimizer_instances": 2}
AUTO = {
    "optimizer_offload_policy": "auto", "optimizer_offload_auto_threshold": 4096,
    "simulated_device_memory": 2_500_000,
}  # fmt: skip
CHUNKS = {
    "precision": "bf16", "optimizer_offload_chunk_size": 1999,
    "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16",
}  # fmt: skip
"""Moments are rounded by each number's place."""
FASTER_B = {"lora_rank": 4, "lora_plus_ratio": 8.0}
FP8 = {"precision": "fp8", "reduce_bucket_size": 3000, "global_batch_size": 8, "train_iters": 2}
IN_8_BITS = {"fp8_param_gather": True}
SOME = IN_8_BITS | {"data_parallel_sharding": "parameters", "param_persistence_threshold": 5000}
"""One of a layer's four matrices stays whole."""
FP8_INSTANCES = INSTANCES | FP8 | {"data_parallel_sharding": "optimizer", "cpu_offloading": True}


class Row(NamedTuple):
    """A run, and the one whose bits it has."""

    changes: dict[str, Any]
    alike: str = ""
    equal: tuple[str, ...] = ("losses",)
    """Norms, weights and states too, where ranks and buckets are the same."""


RUNS = {
    "one": Row({}),
    "one, 4": Row(FOUR),
    "one, 5": Row(FIVE),
    "one, 9": Row(NINE),
    "one, fp8": Row({"precision": "fp8"}),
    "dp": Row({"dp": 2}, "one"),
    "pp": Row({"pp": 2}, "one"),
    "vpp": Row({"pp": 2, "stage": 1}, "one"),
    "vpp, full": Row({"pp": 2, "stage": 1, "recompute_granularity": "full"}, "one"),
    "vpp, accounted": Row({"pp": 2, "stage": 1, **dict.fromkeys(SPLIT_ACCOUNTING_FLAGS, True)}, "one"),
    "vpp, 4": Row({"pp": 2, "stage": 1, **FOUR}, "one, 4"),
    "vpp, 5": Row({"pp": 2, "stage": 1, **FIVE}, "one, 5"),
    "vpp, 5, flush": Row(
        {"pp": 2, "stage": 1, **FIVE, **FLUSH, "microbatch_group_size_per_virtual_pipeline_stage": 5},
        "one, 5",
    ),
    "vpp, fp8": Row({"pp": 2, "stage": 1, "precision": "fp8"}, "one, fp8"),
    "pp, tied": Row({"pp": 2, **TIED}),
    "vpp, tied, by hand": Row({"pp": 2, BY_HAND: "E|ttt|t|L", **TIED}, "pp, tied"),
    "tp, sp": Row({"tp": 2, "sequence_parallel": True}),
    "tp, sp, full": Row(
        {"tp": 2, "sequence_parallel": True, "recompute_granularity": "full"}, "tp, sp", EVERYTHING
    ),
    "none": Row({"dp": 2, **NONE}),
    "none, whole": Row({"dp": 2, **NONE, "reduce_bucket_size": 10**9}, "none"),
    "zero-1": Row({"dp": 2, **ZERO_1}, "none"),
    "zero-1, small": Row({"dp": 2, **ZERO_1, "reduce_bucket_size": 1}, "none"),
    "zero-2": Row({"dp": 2, **ZERO_2}),
    "zero-2, small": Row({"dp": 2, **ZERO_2, "reduce_bucket_size": 1}, "zero-2"),
    "zero-3": Row({"dp": 2, **SHARDED}, "zero-2", ("losses", "weights")),
    "zero-3, full": Row(
        {"dp": 2, **SHARDED, "recompute_granularity": "full", "gradient_accumulation_fusion": True}, "zero-2"
    ),
    "zero-3, bf16, half": Row({"dp": 2, **SHARDED, **CHUNKS, **HALF}, "zero-2, bf16", ("losses", "weights")),
    "host": Row({**ON_HOST, **FOUR, "reduce_bucket_size": 9000}, "one, 4", ("losses", "weights")),
    "host, vpp": Row({"dp": 2, "pp": 2, "stage": 1, **SHARDED, **TIED, **ON_HOST}, "zero-2, pp"),
    "host, part, full": Row(
        {
            "dp": 2, **SHARDED, **CHUNKS, **ON_HOST, "optimizer_offload_fraction": 0.6,
            "optimizer_offload_streamed": 0.5, "cpu_offloading_weights_fraction": 0.5,
            "recompute_granularity": "full",
        },
        "zero-2, bf16", ("losses", "weights"),
    ),
    "bf16 gradients": Row({"dp": 2, **NONE, **BF16_GRADIENTS}),
    "zero-1, bf16 gradients": Row({"dp": 2, **ZERO_1, **BF16_GRADIENTS}, "bf16 gradients"),
    "zero-2, bf16": Row({"dp": 2, **ZERO_2, **CHUNKS}),
    "zero-2, bf16, half": Row({"dp": 2, **ZERO_2, **CHUNKS, **HALF}, "zero-2, bf16", EVERYTHING),
    "zero-2, bf16, streamed": Row(
        {"dp": 2, **ZERO_2, **CHUNKS, **HALF, "optimizer_offload_fraction": 1.0,
         "optimizer_offload_streamed": 0.7},
        "zero-2, bf16", EVERYTHING,
    ),
    "zero-2, bf16, auto": Row({"dp": 2, **ZERO_2, **CHUNKS, **AUTO}, "zero-2, bf16", EVERYTHING),
    "lora+": Row({"dp": 2, **ZERO_2, **CHUNKS, **FASTER_B}),
    "lora+, half": Row({"dp": 2, **ZERO_2, **CHUNKS, **FASTER_B, **HALF}, "lora+", EVERYTHING),
    "pp, tied, bf16": Row({"pp": 2, **TIED, **CHUNKS}),
    "pp, tied, bf16, half": Row({"pp": 2, **TIED, **CHUNKS, **HALF}, "pp, tied, bf16", EVERYTHING),
    "fp8": Row({"dp": 2, "data_parallel_sharding": "gradients", **FP8}),
    "fp8, in 8 bits": Row(
        {"dp": 2, "data_parallel_sharding": "gradients", **FP8, **IN_8_BITS}, "fp8", ("losses", "weights")
    ),
    "zero-3, fp8": Row({"dp": 2, **SHARDED, **FP8}, "fp8", ("losses", "weights")),
    "zero-3, fp8, in 8 bits": Row({"dp": 2, **SHARDED, **FP8, **IN_8_BITS}, "fp8", ("losses", "weights")),
    "pp3, by hand": Row({"pp": 3, BY_HAND: "E|t*3|tL", "recompute_granularity": "full"}, "one"),
    "vpp3, flush": Row({"pp": 3, BY_HAND: "E|t|t|t|t|L", **FOUR, **FLUSH}, "one, 4"),
    "vpp3, waiting": Row(
        {"pp": 3, BY_HAND: "E|t|t|t|t|L", **FOUR, "overlap_p2p_communication": False}, "one, 4"
    ),
    "tp, pp": Row({"tp": 2, "pp": 2}),
    "tp, pp, reversed": Row({"tp": 2, "pp": 2, "rank_order": "pp-tp"}, "tp, pp"),
    "pp, dp, reversed": Row({"pp": 2, "dp": 2, "rank_order": "tp-cp-ep-pp-dp"}, "one"),
    "vpp4, 9": Row({"pp": 4, "stage": 1, **NINE}, "one, 9"),
    "zero-2, pp": Row({"dp": 2, "pp": 2, **ZERO_2, **TIED}),
    "zero-2, vpp": Row({"dp": 2, "pp": 2, "stage": 1, **ZERO_2, **TIED}, "zero-2, pp"),
    "zero-3, vpp": Row({"dp": 2, "pp": 2, "stage": 1, **SHARDED, **TIED}, "zero-2, pp"),
    "none, vpp": Row({"dp": 2, "pp": 2, "stage": 1, **NONE}),
    "zero-1, vpp": Row({"dp": 2, "pp": 2, "stage": 1, **ZERO_1}, "none, vpp"),
    "instances": Row({**INSTANCES, **ZERO_2, **CHUNKS}),
    "instances, half on disk": Row({**INSTANCES, **ZERO_2, **CHUNKS, **ON_DISK}, "instances", EVERYTHING),
    "instances, zero-3": Row({**INSTANCES, **SHARDED, **CHUNKS}, "instances", ("losses", "weights")),
    "instances, fp8": Row(FP8_INSTANCES),
    "instances, fp8, in 8 bits": Row(FP8_INSTANCES | IN_8_BITS, "instances, fp8", ("losses", "weights")),
    "instances, zero-3, fp8, some": Row(FP8_INSTANCES | SOME, "instances, fp8", ("losses", "weights")),
}  # fmt: skip


def config_of(name: str) -> RunConfig:
    return small_run(**{"train_iters": 3} | RUNS[name].changes)


def trained(config: RunConfig) -> dict[str, Any]:
    """The losses, the last one of an evaluation; norms; digests of this rank's weights and states."""
    run = build_seeded_run(config)
    results = train_run(run)
    with run.optimizer.full_weights():
        weights = digest_of(p for stage in run.stages for p in stage.parameters())
    found = {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "weights": weights,
        "states": digests(run)[1],
        "share": run.optimizer.report().offload_fraction,
    }
    new_job()
    return found


def run_all(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: trained(config_of(name)) for name in names}


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """By run: what each rank found."""
    results = {}
    for size in sorted({config_of(name).world_size for name in RUNS}):
        names = [name for name in RUNS if config_of(name).world_size == size]
        ranks = run_distributed(run_all, size, names, timeout_s=280)
        results |= {name: [of_rank[name] for of_rank in ranks] for name in names}
    return results


@pytest.mark.parametrize("name", [name for name, row in RUNS.items() if row.alike])
def test_run_has_the_bits_of_another(found: dict, name: str) -> None:
    row = RUNS[name]
    expected = found[row.alike]
    for rank, ours in enumerate(found[name]):
        theirs = expected[rank if len(row.equal) > 1 else 0]
        assert [field for field in row.equal if ours[field] != theirs[field]] == []


def test_loss_falls_clipping_triggers_and_states_are_where_they_should_be(found: dict) -> None:
    (one,) = found["one"]
    assert one["losses"][2] < one["losses"][0] and max(one["norms"]) > 1.0
    shares = {name: [ours["share"] for ours in ranks] for name, ranks in found.items()}
    assert all(
        share == pytest.approx(0.5, abs=0.1) for name in shares if "half" in name for share in shares[name]
    )
    assert all(0.1 < share < 0.9 for share in shares["zero-2, bf16, auto"])
