"""Context parallelism against one process: losses, gradient norms and evaluation of the same global batches.

Only the order of summation differs. The layouts go through CP's two ways with TP, SP, PP, VPP, DP, sharding,
recomputation, packing, windows, fewer key/value heads than ranks, YaRN, tied embeddings and bf16. They
compute their loss in chunks of a few tokens, one process in one chunk.
"""

import dataclasses
from typing import Any

import pytest
import torch
from distributed_runner import new_job, run_distributed
from packed_runs import PACKED, TalkReader
from small_runs import small_run
from training_runs import CPU, build_seeded_run, saved_for_backward, seeded_batches, train_run

from patch import compat
from patch.config.schema import RunConfig
from patch.data.samples import cut_batch
from patch.distributed.groups import initialize
from patch.distributed.zigzag import Zigzag
from patch.model import build_llama_model, initialize_weights, linear_cross_entropy
from patch.plan import activation_bytes
from patch.training.step import StepResult

LOSS_BOUND, NORM_BOUND = 5e-6, 5e-6
"""Absolute, on losses near 5.6, and relative; AdamW amplifies the rounding of the first step."""
BF16_BOUND = 0.005
CHUNK = 7
"""Tokens; a rank has 16 or 32 of a micro-batch."""
WINDOW = {"window_size": "4,0"}
YARN = {"rope_scaling_type": "yarn", "rope_original_max_position": 16, "rope_scaling_factor": 2.0}
ONE: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": PACKED,
    "packed window": PACKED | WINDOW,
    "families": {"add_qkv_bias": True, "qk_layernorm": True, **WINDOW, **YARN},
    "tied": {"untie_embeddings_and_output_weights": False},
    "bf16": {"precision": "bf16"},
}
P2P, A2A = {"cp": 2, "cp_comm_type": "p2p"}, {"cp": 2, "cp_comm_type": "a2a"}
SP = {"tp": 2, "sequence_parallel": True}
VPP = {"pp": 2, "stage": 1}
ZERO_1 = {"data_parallel_sharding": "optimizer"}
ZERO_2 = {"data_parallel_sharding": "gradients", "reduce_bucket_size": 9000}
SELECTIVE, FULL = {"recompute_granularity": "selective"}, {"recompute_granularity": "full"}
CUT: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("packed", P2P | FULL),
        ("packed", A2A | SELECTIVE),
        ("families", P2P | SELECTIVE | ZERO_2),
        ("tied", A2A | ZERO_1),
        ("bf16", P2P),
    ],
    4: [
        ("plain", P2P | {"cp": 4} | ZERO_1),
        ("families", A2A | {"cp": 4}),
        ("packed", P2P | SP),
        ("plain", A2A | SP | FULL),
        ("packed window", P2P | VPP | FULL),
        ("tied", A2A | {"pp": 2, "rank_order": "pp-cp-tp-dp"}),
        ("packed window", A2A | {"dp": 2} | ZERO_2),
    ],
}
MEASURED = {"p2p": P2P, "a2a": A2A}


def run_of(changes: dict[str, Any]) -> RunConfig:
    return small_run(**{"num_layers": 2, **changes, "train_iters": 2})


def trajectory(config: RunConfig) -> list[StepResult]:
    """Of two steps, and of an evaluation."""
    run = build_seeded_run(config)
    if config.data.packing:
        reader = TalkReader(config, run.groups.dp.rank(), Zigzag.of(run.groups.cp))
        run.train_reader, run.valid_readers = reader, {"valid": reader}  # type: ignore[assignment]
    results = train_run(run)
    new_job()
    return results


def train_all(rank: int, world_size: int, configs: list[RunConfig]) -> list[list[StepResult]]:
    return [trajectory(config) for config in configs]


def train_and_measure(rank: int, world_size: int, configs: list[RunConfig]) -> tuple[list, dict]:
    linear_cross_entropy.chunk_length = lambda *shape: CHUNK
    trained = train_all(rank, world_size, configs)
    return trained, held_by_layers() if world_size == 2 else {}


def held_by_layers() -> dict[str, int]:
    """By way: bytes that one layer's backward waits for on this rank."""
    compat.apply(cuda=False)
    groups = initialize(run_of(P2P), CPU)
    found = {}
    for way, changes in MEASURED.items():
        held = []
        for layers in (1, 2):
            config = run_of(changes | {"num_layers": layers})
            (stage,) = stages = build_llama_model(config.model, groups, CPU.device, config.execution)
            initialize_weights(stages, config.model, 1)
            batch = cut_batch(seeded_batches(config, 0)[0], Zigzag.of(groups.cp))
            weights = {p.untyped_storage()._cdata for p in stage.parameters()}
            saved: dict[int, torch.UntypedStorage] = {}
            with saved_for_backward(saved):
                stage(batch.tokens, None, None, labels=batch.labels)
            held.append(sum(s.nbytes() for key, s in saved.items() if key not in weights))
        found[way] = held[1] - held[0]
    return found


@pytest.fixture(scope="module")
def whole() -> dict[str, list[StepResult]]:
    """By name: the results of one process."""
    results = run_distributed(train_all, 1, [run_of(changes) for changes in ONE.values()])[0]
    return dict(zip(ONE, results, strict=True))


@pytest.fixture(scope="module")
def cut() -> dict[int, list[tuple[list, dict]]]:
    """By number of processes: the results of each rank."""
    return {
        size: run_distributed(
            train_and_measure, size, [run_of(ONE[name] | changes) for name, changes in layouts], timeout_s=240
        )
        for size, layouts in CUT.items()
    }


@pytest.mark.parametrize(
    ("size", "number"), [(size, number) for size, layouts in CUT.items() for number in range(len(layouts))]
)
def test_every_layout_trains_as_one_process(whole: dict, cut: dict, size: int, number: int) -> None:
    name, _ = CUT[size][number]
    loss_bound, norm_bound = (BF16_BOUND, 0.01) if name == "bf16" else (LOSS_BOUND, NORM_BOUND)
    one = whole[name]
    for trained, _ in cut[size]:
        ours = trained[number]
        assert [r.loss for r in ours] == pytest.approx([r.loss for r in one], abs=loss_bound)
        assert [r.grad_norm for r in ours] == pytest.approx([r.grad_norm for r in one], rel=norm_bound)
        assert [r.attended_pairs for r in ours] == [r.attended_pairs for r in one]


@pytest.mark.parametrize("way", MEASURED)
def test_the_plan_says_what_a_layer_holds(cut: dict, way: str) -> None:
    config = run_of(MEASURED[way])
    sections = config.model, config.parallel, config.training
    planned = activation_bytes(*sections, length=config.sample_length, cuda=False)[None]
    whole = activation_bytes(
        *(dataclasses.replace(s, context_parallel_size=1) if s is config.parallel else s for s in sections),
        length=config.sample_length, cuda=False,
    )[None]  # fmt: skip
    assert planned < 0.55 * whole
    for _, held in cut[2]:
        assert planned == pytest.approx(held[way], rel=0.005)
