"""Context parallelism against one process: losses, gradient norms and evaluation of the same global batches.

Only the order of summation differs. The layouts cover every pair of CP's two ways with TP, SP, PP, VPP, DP,
sharding, recomputation, packing, windows, grouped heads fewer than ranks, tied embeddings and bf16.
"""

import dataclasses
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from packed_runs import PACKED, TalkReader
from small_runs import small_run
from training_runs import build_seeded_run, saved_for_backward, train_run

from patch.config.schema import RunConfig
from patch.distributed.zigzag import Zigzag
from patch.plan import activation_bytes
from patch.training.step import StepResult

LOSS_BOUND, NORM_BOUND = 5e-6, 5e-6
"""Absolute, on losses near 5.6, and relative; AdamW amplifies the rounding of the first of three steps."""
BF16_BOUND = 0.005
ONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": PACKED,
    "families": {"window_size": "7,0", "add_qkv_bias": True, "qk_layernorm": True},
    "packed window": PACKED | {"window_size": "4,0"},
    "tied": {"untie_embeddings_and_output_weights": False},
    "bf16": {"precision": "bf16"},
    "bf16 packed": PACKED | {"precision": "bf16"},
}
P2P, A2A = {"cp_comm_type": "p2p"}, {"cp_comm_type": "a2a"}
SP = {"tp": 2, "cp": 2, "sequence_parallel": True}
VPP = {"pp": 2, "stage": 1, "cp": 2}
ZERO_1 = {"dp": 2, "cp": 2, "data_parallel_sharding": "optimizer"}
ZERO_2 = {"dp": 2, "cp": 2, "data_parallel_sharding": "gradients", "reduce_bucket_size": 9000}
SELECTIVE, FULL = {"recompute_granularity": "selective"}, {"recompute_granularity": "full"}
CUT: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("plain", {"cp": 2, **P2P, **FULL}),
        ("plain", {"cp": 2, **A2A, **SELECTIVE}),
        ("packed", {"cp": 2, **P2P, **SELECTIVE}),
        ("packed", {"cp": 2, **A2A, **FULL}),
        ("families", {"cp": 2, **P2P}),
        ("tied", {"cp": 2, **P2P, "data_parallel_sharding": "gradients"}),
        ("bf16", {"cp": 2, **P2P}),
        ("bf16 packed", {"cp": 2, **A2A}),
    ],
    4: [
        ("plain", {"cp": 4, **P2P, "data_parallel_sharding": "optimizer"}),
        ("families", {"cp": 4, **A2A}),
        ("packed", {"cp": 4, **P2P}),
        ("packed", {**SP, **P2P}),
        ("families", {**SP, **A2A, **FULL}),
        ("plain", {"tp": 2, "cp": 2, **P2P}),
        ("tied", {"pp": 2, "cp": 2, **A2A}),
        ("packed window", {**VPP, **P2P, **FULL}),
        ("packed", {**VPP, **A2A, **SELECTIVE}),
        ("packed window", {**ZERO_1, **A2A}),
        ("plain", {**ZERO_2, **P2P}),
        ("bf16", {**SP, **P2P}),
    ],
}


def run_of(changes: dict[str, Any]) -> RunConfig:
    return small_run(**{"train_iters": 3, "num_layers": 2, **changes})


def trajectory(config: RunConfig) -> list[StepResult]:
    """Of three steps, and of an evaluation."""
    run = build_seeded_run(config)
    if config.data.packing:
        reader = TalkReader(config, run.groups.dp.rank(), Zigzag.of(run.groups.cp))
        run.train_reader, run.valid_readers = reader, {"valid": reader}  # type: ignore[assignment]
    results = train_run(run)
    new_job()
    return results


def train_all(rank: int, world_size: int, configs: list[RunConfig]) -> list[list[StepResult]]:
    return [trajectory(config) for config in configs]


def held_by_a_layer(config: RunConfig) -> int:
    """Bytes that one layer's backward waits for on this rank."""
    held = []
    for layers in (1, 2):
        model = dataclasses.replace(config.model, num_layers=layers)
        run = build_seeded_run(dataclasses.replace(config, model=model))
        (stage,) = run.stages
        batch = run.train_reader.step(0)[0]
        weights = {p.untyped_storage()._cdata for p in stage.parameters()}
        saved: dict[int, torch.UntypedStorage] = {}
        with saved_for_backward(saved):
            stage(batch.tokens, None, None, labels=batch.labels)
        held.append(sum(s.nbytes() for key, s in saved.items() if key not in weights))
        new_job()
    return held[1] - held[0]


def measure_layers(rank: int, world_size: int, configs: list[RunConfig]) -> list[int]:
    return [held_by_a_layer(config) for config in configs]


@pytest.fixture(scope="module")
def whole() -> dict[str, list[StepResult]]:
    """By name: the results of one process."""
    results = run_distributed(train_all, 1, [run_of(changes) for changes in ONE.values()])[0]
    return dict(zip(ONE, results, strict=True))


@pytest.mark.parametrize("world_size", CUT)
def test_every_layout_trains_as_one_process(whole: dict, world_size: int) -> None:
    configs = [run_of(ONE[name] | changes) for name, changes in CUT[world_size]]
    ranks = run_distributed(train_all, world_size, configs, timeout_s=240)
    for number, (name, changes) in enumerate(CUT[world_size]):
        bounds = (BF16_BOUND, 0.01) if "bf16" in name else (LOSS_BOUND, NORM_BOUND)
        for rank in ranks:
            cut, one = rank[number], whole[name]
            losses = [result.loss for result in cut]
            assert losses == pytest.approx([r.loss for r in one], abs=bounds[0]), (name, changes)
            norms = [result.grad_norm for result in cut]
            assert norms == pytest.approx([r.grad_norm for r in one], rel=bounds[1]), (name, changes)
            assert [r.attended_pairs for r in cut] == [r.attended_pairs for r in one], (name, changes)


def test_the_plan_says_what_a_layer_holds() -> None:
    configs = [run_of({"cp": 2, **way}) for way in (P2P, A2A)]
    for measured in run_distributed(measure_layers, 2, configs):
        for config, held in zip(configs, measured, strict=True):
            sections = config.model, config.parallel, config.training
            planned = activation_bytes(*sections, length=config.sample_length, cuda=False)[None]
            assert planned == pytest.approx(held, rel=0.005), config.parallel.cp_comm_type
