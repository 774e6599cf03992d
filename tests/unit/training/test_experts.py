"""Models with experts: steps of several processes against one process, losses of the router, checkpoints."""

import contextlib
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import HALF, ZERO_3, small_run
from training_runs import (
    SeededReader,
    build_seeded_run,
    digests,
    save,
    seeded_batches,
    stored_tensors,
    train_run,
)

from patch.config.schema import RunConfig
from patch.data import Batch
from patch.distributed.collectives import max_over_world
from patch.model.experts import routers_of
from patch.training.metrics import loads_of_experts
from patch.training.run_state import Progress, find_progress, resume
from patch.training.step import StepResult, train_step

STEPS = 2
SHAPE: dict[str, Any] = {
    "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_shared_expert_intermediate_size": 80,
    "moe_shared_expert_gate": True, "moe_layer_freq": "[0]*1+[1]*3", "global_batch_size": 8,
    "train_iters": STEPS, "moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.05,
    "moe_z_loss_coeff": 0.01,
}  # fmt: skip
"""The first layer has none."""
BOUND = 1e-6
"""Of losses near 5.6, and relative of norms: sums in another order. Largest measured: 4e-7."""

EP2 = {"expert_model_parallel_size": 2}
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
SP2 = {"tp": 2, "sequence_parallel": True}
ETP1 = {"expert_tensor_parallel_size": 1}
FULL = {"recompute_granularity": "full"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP=2 over TP=2, ETP=1, fused, selective": {
        **SP2, **EP2, **ETP1, "gradient_accumulation_fusion": True, "recompute_granularity": "selective"
    },
    "EP=2 x ETP=2 over TP x DP, ZeRO-3, half offloaded": {
        "dp": 2, **ZERO_3, **SP2, **EP2, **ALLGATHER, **HALF
    },
    "EP=4 over CP x DP, ZeRO-1, full": {
        "cp": 2, "cp_comm_type": "p2p", "dp": 2, "expert_model_parallel_size": 4, **FULL,
        "data_parallel_sharding": "optimizer",
    },
    "EP=2, PP=2 interleaved": {"pp": 2, "stage": 1, "dp": 2, **EP2},
    "EP=2, activations offloaded": {"dp": 2, "cpu_offloading": True, **EP2},
}  # fmt: skip
"""Any two values are together in tests/covered_layouts.md; each is here once."""


HARD = {"num_layers": 1, "moe_layer_freq": "1", "max_padding_length": 4, "micro_batch_size": 1}
"""Rows of four tokens; they all choose the same two experts."""
HARD_LAYOUTS: dict[str, dict[str, Any]] = {
    "a token a rank": {**SP2, "cp": 2, "cp_comm_type": "a2a", "expert_model_parallel_size": 4, **ETP1},
    "all tokens of all ranks to two ranks": {"dp": 4, "expert_model_parallel_size": 4},
    "the same, to all ranks": {"dp": 4, "expert_model_parallel_size": 4, **ALLGATHER, **FULL},
}
Found = tuple[list[StepResult], dict[str, float]]


def rows_of_step(config: RunConfig, iteration: int) -> list[Batch]:
    """The micro-batches of a step whose rows do not depend on their size."""
    whole = seeded_batches(small_run(**SHAPE | {"micro_batch_size": 8}), iteration)[0]
    size = config.training.micro_batch_size
    parts = zip(*(each.split(size) for each in (whole.tokens, whole.labels, whole.loss_mask)), strict=True)
    return [Batch(*part) for part in parts]


def steps(rank: int, world_size: int, changes: list[dict[str, Any]], kind: str = "") -> list[Found]:
    """Steps and an evaluation of some runs, and the loads of the last step."""
    found = []
    for each in changes:
        run = build_seeded_run(small_run(**SHAPE | each))
        if kind == "rows":
            reader = SeededReader(run.config, run.groups.dp.rank(), batches=rows_of_step)
            run.data.train_reader = run.data.valid_readers["valid"] = reader
        for router in routers_of(run.stages) if kind == "hard" else ():
            router.weight.data.zero_()
        run.optimizer.reload_model_params()
        found.append((train_run(run), loads_of_experts(run)))
        new_job()
    return found


def by_name(layouts: dict[str, dict[str, Any]], kind: str = "", **changes: Any) -> dict[str, Found]:
    """What `steps` finds of each layout; "" is one process."""
    layouts, found = {"": {}, **layouts}, {}
    configs = {name: small_run(**SHAPE | changes | own) for name, own in layouts.items()}
    for size in sorted({config.world_size for config in configs.values()}):
        names = [name for name, config in configs.items() if config.world_size == size]
        of_rank_0 = run_distributed(steps, size, [changes | layouts[name] for name in names], kind)[0]
        found |= dict(zip(names, of_rank_0, strict=True))
    return found


def check(found: Found, alone: Found) -> None:
    """Losses, norms and loads are those of one process."""
    for ours, expected in zip(found[0], alone[0], strict=True):
        assert ours.loss == pytest.approx(expected.loss, abs=BOUND)
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=BOUND)
    assert found[1] == pytest.approx(alone[1], rel=1e-5)


@pytest.fixture(scope="module")
def found() -> dict[str, Found]:
    return by_name(LAYOUTS)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_trains_as_one_process_does(found: dict[str, Found], name: str) -> None:
    check(found[name], found[""])


def test_a_record_has_the_loads_of_each_layer_with_experts(found: dict[str, Found]) -> None:
    loads = found[""][1]
    assert {key.split("/")[1] for key in loads} == {"2", "3", "4"}
    for number in "234":
        assert loads[f"expert_load_max/{number}"] > 1 > loads[f"expert_load_min/{number}"] > 0
        assert loads[f"expert_dropped/{number}"] == 0
        assert loads[f"aux_loss/{number}"] == pytest.approx(1, rel=0.3)
        assert loads[f"z_loss/{number}"] == pytest.approx(math.log(4) ** 2, rel=0.3)


def test_experts_without_tokens_and_ranks_with_fewer_than_there_are_experts_train_as_one_process() -> None:
    found = by_name(HARD_LAYOUTS, "hard", **HARD)
    for name in HARD_LAYOUTS:
        check(found[name], found[""])
    dropping = {"moe_expert_capacity_factor": 1.0}
    ((_, loads),) = run_distributed(steps, 1, [{**HARD, **dropping, "train_iters": 1}], "hard")[0:1][0]
    assert loads["expert_dropped/1"] == 0.5 and loads["expert_load_max/1"] == 2


def test_losses_of_tokens_and_rows_do_not_depend_on_how_a_batch_is_divided() -> None:
    layouts = {
        "micro-batches of one row": {"micro_batch_size": 1},
        "of all rows": {"micro_batch_size": 8},
        "of two replicas with distributed experts": {"dp": 2, "micro_batch_size": 1, **EP2},
    }
    found = by_name(layouts, "rows")
    for name in layouts:
        check(found[name], found[""])


CHAIN: dict[str, dict[str, Any]] = {
    "one": {},
    "EP=2 x DP, ZeRO-3": {"dp": 4, **ZERO_3, **EP2},
    "EP=2 x ETP=2 x PP, ZeRO-1": {
        "pp": 2, "dp": 2, "data_parallel_sharding": "optimizer", "expert_model_parallel_size": 2
    },
    "EP=2 x TP, ETP=1, half offloaded": {**SP2, **EP2, **ETP1, **HALF},
    "ETP=2": SP2,
    "one again": {},
}  # fmt: skip


def go_through(
    rank: int, world_size: int, root: Path, names: list[str], before: str | None
) -> list[list[float]]:
    """Of each layout the losses after the checkpoint of the layout before, which it saves again."""
    found = []
    for name in names:
        run = build_seeded_run(small_run(**SHAPE | CHAIN[name] | {"train_iters": 3}))
        if before is None:
            train_step(run, 0)
        else:
            resume(root / before, find_progress(root / before), run.stages, run.optimizer, seed=1234)
        save(root / name, Progress(1, 8), run.stages, run.optimizer)
        losses = [train_step(run, iteration).loss for iteration in (1, 2)]
        found.append(max_over_world(losses, run.device))
        run.optimizer.finish_param_sync()
        new_job()
        before = name
    return found


def test_a_checkpoint_goes_over_ep_tp_and_pp_and_back_with_the_same_bits(tmp_path: Path) -> None:
    losses, before = [], None
    for size, names in itertools.groupby(CHAIN, lambda name: small_run(**CHAIN[name]).world_size):
        own = list(names)
        losses += run_distributed(go_through, size, tmp_path, own, before)[0]
        before = own[-1]
    expected = stored_tensors(tmp_path / "one" / "iter_0000001")
    assert any("experts.experts" in key for key in expected)
    for name, of_layout in zip(CHAIN, losses, strict=True):
        stored = stored_tensors(tmp_path / name / "iter_0000001")
        assert stored.keys() == expected.keys(), name
        assert [key for key in expected if not torch.equal(stored[key], expected[key])] == [], name
        assert of_layout == pytest.approx(losses[0], abs=BOUND), name


OFFLOADED = {
    "num_layers": 2, "moe_layer_freq": "1", "num_experts": 8, "moe_ffn_hidden_size": 256,
    "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 3, "reduce_bucket_size": 50_000,
    "optimizer_offload_chunk_size": 20_000, **SP2,
}  # fmt: skip
"""Ranks of a TP group, which have equally much to keep, and do not try a step again."""
IN_PLACE = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.0}
AUTO = {"optimizer_offload_policy": "auto", "optimizer_offload_auto_threshold": 0}


def train_long_rows(length: int, device_bytes: int, policy: dict[str, Any]) -> tuple[Any, float, int]:
    """Bits of some steps (None: the device is too small), the offloaded fraction, and the largest peak."""
    lengths = {"max_padding_length": length, "seq_length": length, "max_position_embeddings": length}
    device = {"simulated_device_memory": device_bytes}
    run = build_seeded_run(small_run(**SHAPE | OFFLOADED | lengths | policy | device))
    bits: Any = None
    with contextlib.suppress(torch.OutOfMemoryError):
        results = [train_step(run, iteration) for iteration in range(3)]
        bits = [(result.loss, result.grad_norm) for result in results], digests(run)
    fraction, device = run.optimizer.report().offload_fraction, run.optimizer.placement.device
    new_job()
    return bits, fraction, device.pop_peak_bytes()


def compare_lengths(rank: int, world_size: int) -> dict[int, list[tuple[Any, float, int]]]:
    found = {length: [train_long_rows(length, 10**12, IN_PLACE)] for length in (2048, 4096)}
    states_of_a_layer = 12 * 8 * 3 * 256 * 64 // 2
    device_bytes = found[4096][0][2] - states_of_a_layer
    for length, runs in found.items():
        runs += [train_long_rows(length, device_bytes, policy) for policy in (IN_PLACE, AUTO)]
    return found


@pytest.mark.long
def test_long_rows_fit_a_device_where_auto_offload_takes_states_away_and_have_the_same_bits() -> None:
    """The article on Pai's offload in small: Qwen 2 MoE at 2048 and 4096 tokens."""
    for found in run_distributed(compare_lengths, 2):
        for length, ((bits, *_), (in_place, *_), (auto, fraction, _)) in found.items():
            assert auto == bits, length
            assert in_place == (None if length == 4096 else bits), length
            assert fraction > 0.1 if length == 4096 else fraction == 0, length
