"""Experts: losses of the router, loads of layers, ranks and experts without tokens, offload of their states.

That layouts train as one process: test_covered_layouts.py. Checkpoints: test_any_layout.py.
"""

import contextlib
import math
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from training_runs import SeededReader, build_seeded_run, digests, seeded_batches, train_run

from patch.config.schema import RunConfig
from patch.data import Batch
from patch.distributed.context_group import Zigzag
from patch.model.experts.layer import routers_of
from patch.training.hooks.metrics import loads_of_experts
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
EP2, EP4 = ({"expert_model_parallel_size": size} for size in (2, 4))
ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
SP2 = {"tp": 2, "sequence_parallel": True}
HARD = {"num_layers": 1, "moe_layer_freq": "1", "max_padding_length": 4, "micro_batch_size": 1}
"""Rows of four tokens; they all choose the same two experts."""
HARD_LAYOUTS: dict[str, dict[str, Any]] = {
    "": {},
    "a token a rank": {**SP2, "cp": 2, "cp_comm_type": "a2a", **EP4, "expert_tensor_parallel_size": 1},
    "all tokens of all ranks to two ranks": {"dp": 4, **EP4},
    "the same, to all ranks": {"dp": 4, **EP4, **ALLGATHER, "recompute_granularity": "full"},
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


def compared(layouts: dict[str, dict[str, Any]], kind: str, **changes: Any) -> Found:
    """Train each layout as the first one, which is one process: its losses, norms and loads."""
    sizes = {name: small_run(**SHAPE | changes | own).world_size for name, own in layouts.items()}
    alone: Found | None = None
    for size in sorted({*sizes.values()}):
        runs = {name: changes | layouts[name] for name in layouts if sizes[name] == size}
        found = run_distributed(steps, size, [*runs.values()], kind)[0]
        alone = alone or found[0]
        for name, (results, loads) in zip(runs, found, strict=True):
            for ours, expected in zip(results, alone[0], strict=True):
                assert ours.loss == pytest.approx(expected.loss, abs=BOUND), name
                assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=BOUND), name
            assert loads == pytest.approx(alone[1], rel=1e-5), name
    assert alone is not None
    return alone


@pytest.mark.long
def test_losses_and_loads_do_not_depend_on_how_a_batch_is_divided() -> None:
    layouts = {
        "": {},
        "micro-batches of one row": {"micro_batch_size": 1},
        "of all rows": {"micro_batch_size": 8},
        "replicas with distributed experts": {"dp": 2, "micro_batch_size": 1, **EP2},
        "interleaved stages": {"pp": 2, "stage": 1, "dp": 2, "micro_batch_size": 1, **EP2},
    }
    (_, loads) = compared(layouts, "rows")
    assert {key.split("/")[1] for key in loads} == {"2", "3", "4"}
    for number in "234":
        assert loads[f"expert_load_max/{number}"] > 1 > loads[f"expert_load_min/{number}"] > 0
        assert loads[f"expert_dropped/{number}"] == 0
        assert loads[f"aux_loss/{number}"] == pytest.approx(1, rel=0.3)
        assert loads[f"z_loss/{number}"] == pytest.approx(math.log(4) ** 2, rel=0.3)


@pytest.mark.parametrize(
    "adapters", [{}, pytest.param({"lora_rank": 3}, marks=pytest.mark.long)], ids=["all train", "adapters"]
)
def test_experts_and_ranks_without_tokens_train_as_one_process(adapters: dict[str, Any]) -> None:
    compared(HARD_LAYOUTS, "hard", **HARD, **adapters)


V3 = {
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "num_experts": 8,
    "moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 3,
    "moe_router_bias_update_rate": 0.01, "moe_aux_loss_coeff": 1e-4,
}  # fmt: skip
"""DeepSeek-V3's router; eight experts in four groups."""
V3_LAYOUTS: dict[str, dict[str, Any]] = {
    "": {"micro_batch_size": 8},
    "recomputed": {"micro_batch_size": 2, "recompute_granularity": "full"},
    "TP x EP": {**SP2, **EP2, "expert_tensor_parallel_size": 1, "micro_batch_size": 1},
    "CP x EP x replicas": {"cp": 2, "dp": 2, "cp_comm_type": "a2a", **EP4, "micro_batch_size": 1},
    "interleaved stages x EP": {"pp": 2, "stage": 1, "dp": 2, "micro_batch_size": 1, **EP2},
}


def biases(rank: int, world_size: int, changes: dict[str, Any]) -> dict[int, list[Any]]:
    """By layer: the bias after each step, and the choices [experts] that this rank counts by itself."""
    run = build_seeded_run(small_run(**SHAPE | V3 | changes))
    run.data.train_reader = SeededReader(
        run.config, run.groups.dp.rank(), Zigzag.of(run.groups.cp), batches=rows_of_step
    )
    found: dict[int, list[Any]] = {router.layer_number: [] for router in routers_of(run.stages)}
    loads = {number: torch.zeros(8) for number in found}

    def count(router: Any, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            loads[router.layer_number] += output[1].sum(0)

    for router in routers_of(run.stages):
        router.register_forward_hook(count)
    for iteration in range(STEPS):
        train_step(run, iteration)
        for router in routers_of(run.stages):
            own = loads[router.layer_number]
            found[router.layer_number].append((router.expert_bias.tolist(), own.tolist()))
            own.zero_()
    return found


def test_biases_of_experts_follow_the_loads_of_the_global_batch_with_the_same_bits() -> None:
    """The oracle is plain torch, on the counts of one process; each layout has the bits of that process."""
    (alone,) = run_distributed(biases, 1, V3_LAYOUTS[""])
    for steps in alone.values():
        bias = torch.zeros(8)
        for found, loads in steps:
            load = torch.tensor(loads)
            assert load.sum() == 3 * 8 * 32
            bias = bias + 0.01 * torch.sign(load.mean() - load)
            assert found == bias.tolist() and len({*found}) > 1
    for name, layout in [*V3_LAYOUTS.items()][1:]:
        ranks = run_distributed(biases, small_run(**SHAPE | V3 | layout).world_size, layout)
        for number, steps in alone.items():
            theirs = [each[number] for each in ranks if number in each]
            for step, (expected, _) in enumerate(steps):
                assert theirs and all(each[step][0] == expected for each in theirs), name


@pytest.mark.parametrize("frozen", [{"lora_rank": 3}, {"freeze": r"mlp\.gate\."}], ids=["adapters", "frozen"])
def test_a_router_that_does_not_train_keeps_its_biases(frozen: dict[str, Any]) -> None:
    (found,) = run_distributed(biases, 1, {"micro_batch_size": 8, **frozen})
    assert all(bias == [0] * 8 for steps in found.values() for bias, _ in steps)


def test_tokens_beyond_the_capacity_are_dropped_and_counted() -> None:
    dropping = {**HARD, "moe_expert_capacity_factor": 1.0, "train_iters": 1}
    (((_, loads),),) = run_distributed(steps, 1, [dropping], "hard")
    assert loads["expert_dropped/1"] == 0.5 and loads["expert_load_max/1"] == 2


LONG_ROWS = {
    "num_layers": 2, "moe_layer_freq": "1", "num_experts": 8, "moe_ffn_hidden_size": 256,
    "micro_batch_size": 1, "global_batch_size": 2, "train_iters": 3, "reduce_bucket_size": 50_000,
    "optimizer_offload_chunk_size": 20_000, "max_padding_length": 2048, "seq_length": 2048,
    "max_position_embeddings": 2048, **SP2,
}  # fmt: skip
"""Ranks of a TP group, which have equally much to keep, and do not try a step again."""
IN_PLACE = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.0}
AUTO = {"optimizer_offload_policy": "auto", "optimizer_offload_auto_threshold": 0}


def train_long_rows(device_bytes: int, policy: dict[str, Any]) -> tuple[Any, float, int]:
    """Bits of some steps (None: the device is too small), the offloaded fraction, and the largest peak."""
    device = {"simulated_device_memory": device_bytes}
    run = build_seeded_run(small_run(**SHAPE | LONG_ROWS | policy | device))
    bits: Any = None
    with contextlib.suppress(torch.OutOfMemoryError):
        results = [train_step(run, iteration) for iteration in range(3)]
        bits = [(result.loss, result.grad_norm) for result in results], digests(run)
    fraction, peak = run.optimizer.report().offload_fraction, run.optimizer.placement.device.pop_peak_bytes()
    new_job()
    return bits, fraction, peak


def compare_devices(rank: int, world_size: int) -> list[tuple[Any, float]]:
    bits, _, peak = train_long_rows(10**12, IN_PLACE)
    states_of_a_layer = 12 * 8 * 3 * 256 * 64 // 2
    smaller = [train_long_rows(peak - states_of_a_layer, policy)[:2] for policy in (IN_PLACE, AUTO)]
    return [(bits, 0.0), *smaller]


@pytest.mark.long
def test_auto_offload_fits_long_rows_into_a_device_that_is_too_small_with_the_same_bits() -> None:
    """The article on Pai's offload in small: Qwen 2 MoE at long sequences."""
    for (bits, _), (in_place, _), (auto, fraction) in run_distributed(compare_devices, 2):
        assert in_place is None and auto == bits and fraction > 0.1
