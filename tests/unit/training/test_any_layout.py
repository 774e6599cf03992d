"""A checkpoint of any layout is loaded at any other: the same bits on disk, the same losses from there on.

A run goes through a chain of layouts. Each loads what the layout before saved, saves it again, and trains on.
torch's own DCP reads what they saved into whole tensors, in one process.
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
LENGTHS = {"global_batch_size": 8, "train_iters": STEPS, "max_padding_length": 16, "seq_length": 16}
BY_HAND = "pipeline_model_parallel_layout"
NONE, ZERO_1, ZERO_2 = ({"data_parallel_sharding": level} for level in ("none", "optimizer", "gradients"))
BOTH = {"tp": 2, "cp": 2, "rank_order": "cp-tp", "cp_comm_type": "p2p"}
INTERLEAVED = {"pp": 2, "stage": 1, "cp": 2, "cp_comm_type": "a2a"}
SP2, EP2 = {"tp": 2, "sequence_parallel": True}, {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
Layouts = dict[str, dict[str, Any]]
CHAIN: Layouts = {
    "one": {},
    "TP x PP, interleaved by hand, SP": SP2 | {"pp": 2, BY_HAND: "Et|tt|t|L"},
    "DP, ZeRO-2, half offloaded": {"dp": 4, "reduce_bucket_size": 9000, **ZERO_2, **HALF},
    "TP x DP, replicated": {"tp": 2, "dp": 2, **NONE},
    "PP x DP, accounted, ZeRO-3": {"pp": 2, "dp": 2, "account_for_loss_in_pipeline_split": True, **ZERO_3},
    "TP x DP, ZeRO-3, half offloaded": {"tp": 2, "dp": 2, **ZERO_3, **HALF},
    "TP x CP in the other order, ZeRO-2": BOTH | ZERO_2,
    "PP x CP, interleaved, half on disk": INTERLEAVED | ZERO_1 | ON_DISK,
    "TP x DP, on the host": SP2 | {"dp": 2, **ON_HOST},
    "PP3, by hand": {"pp": 3, BY_HAND: "E|ttt|tL"},
    "one again, on the host": {"reduce_bucket_size": 50_000, **ON_HOST},
}
SAME_SUMS = {"DP, ZeRO-2, half offloaded", "PP3, by hand", "one again, on the host"}
"""Layouts whose sums have the order of one process."""
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_shared_expert_intermediate_size": 80,
    "moe_shared_expert_gate": True, "moe_layer_freq": "[0]*1+[1]*3", "moe_aux_loss_coeff": 0.05,
    "moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 0.01,
    "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True,
}  # fmt: skip
EXPERT_CHAIN: Layouts = {
    "one": {},
    "EP=2 x DP, ZeRO-3": {"dp": 4, **ZERO_3, **EP2},
    "EP=2 x ETP=2 x PP, ZeRO-1": {"pp": 2, "dp": 2, **ZERO_1, **EP2},
    "EP=2 x TP, ETP=1, half offloaded": {**SP2, **EP2, **ETP1, **HALF},
    "ETP=2": SP2,
    "one again": {},
}
NF4: dict[str, Any] = {
    "lora_rank": 3, "lora_target_modules": "q_proj,v_proj,up_proj", "quantize_base": "nf4-double",
    "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 8, "kv_channels": 16,
}  # fmt: skip
"""A resume compares the checksum of the base: each layout has the same 4 bits."""
NF4_CHAIN: Layouts = {
    "one": {},
    "SP": SP2,
    "ZeRO-3, base in shards": {"dp": 2, **ZERO_3, "recompute_granularity": "full"},
    "base on the host": ON_HOST,
}
SOME = EXPERTS | {"lora_rank": 3, "lora_target_modules": "*.experts.*", "moe_layer_freq": "[1]*2+[0]*2"}
SOME_CHAIN: Layouts = {
    "one": {},
    "PP, a stage without adapters": {"pp": 2},
    "EP, ZeRO-3": {"dp": 2, **EP2, **ZERO_3},
    "ETP=2": SP2 | {"recompute_granularity": "full"},
}
FROZEN = {"freeze": r"embed|layers\.[02]\..*mlp|o_proj"}
FROZEN_CHAIN: Layouts = {
    "one": {},
    "PP interleaved, SP": SP2 | {"pp": 2, "stage": 1, "recompute_granularity": "full"},
    "ZeRO-3, half offloaded": {"dp": 2, **ZERO_3, **HALF},
    "ZeRO-2": {"dp": 2, **ZERO_2, "reduce_bucket_size": 9000},
    "on the host": ON_HOST,
}
SGD_CHAIN: Layouts = {
    "one": {},
    "TP x DP, ZeRO-3, half offloaded": {"tp": 2, "dp": 2, **ZERO_3, **HALF},
    "DP, ZeRO-1, half on disk": {"dp": 2, **ZERO_1, **ON_DISK},
}
MUON = {"optimizer": "muon", "muon_scale_mode": "shape_scaling"}
MUON_CHAIN: Layouts = {
    "one": {},
    "TP x PP, SP": SP2 | {"pp": 2},
    "DP, ZeRO-2, half offloaded": {"dp": 4, "reduce_bucket_size": 9000, **ZERO_2, **HALF},
    "TP x DP, ZeRO-3, half offloaded": {"tp": 2, "dp": 2, **ZERO_3, **HALF},
    "one again, on the host": {"reduce_bucket_size": 50_000, **ON_HOST},
}
FP8 = {"precision": "fp8", "reduce_bucket_size": 3000}
FP8_CHAIN: Layouts = {
    "16 bits": {"dp": 2, **ZERO_2},
    "8 bits": {"dp": 2, **ZERO_2, "fp8_param_gather": True},
    "ZeRO-3, 8 bits": {"dp": 2, **ZERO_3, "fp8_param_gather": True},
    "8 bits again": {"dp": 2, **ZERO_2, "fp8_param_gather": True},
    "16 bits again": {"dp": 2, **ZERO_2},
}


class Kind(NamedTuple):
    """A run that goes through a chain."""

    changes: dict[str, Any]
    layouts: Layouts
    bound: float
    """Of losses near 5.6 whose sums have another order."""


KINDS = {
    "fp32": Kind({}, CHAIN, 5e-6),
    "bf16": Kind({"precision": "bf16"}, CHAIN, 0.01),
    "experts": Kind(EXPERTS, EXPERT_CHAIN, 2e-6),
    "frozen": Kind(FROZEN, FROZEN_CHAIN, 2e-6),
    "8 bits": Kind(FP8, FP8_CHAIN, 0.0),
    "SGD": Kind({"precision": "bf16", "optimizer": "sgd", "lr": 0.1}, SGD_CHAIN, 0.01),
    "Muon": Kind(MUON, MUON_CHAIN, 2e-4),
    "Muon of experts": Kind(EXPERTS | MUON, EXPERT_CHAIN, 2e-5),
    "adapters beside 4 bits": Kind(NF4, NF4_CHAIN, 2e-6),
    "adapters of some experts": Kind(SOME, SOME_CHAIN, 2e-6),
}
Results = tuple[str, Path, dict[str, tuple[list[float], int]]]


def go_through(rank: int, world_size: int, root: Path, kind: str, names: list[str], before: str) -> dict:
    """By layout: the losses of its further steps, and how many samples it found consumed."""
    found = {}
    for name in names:
        config = small_run(**LENGTHS | KINDS[kind].changes | KINDS[kind].layouts[name], seed=1234)
        run = build_seeded_run(config)
        consumed = 0
        if not before:
            for iteration in range(DONE):
                train_step(run, iteration)
        else:
            progress = find_progress(root / before)
            resume(run, root / before, progress)
            consumed = progress.consumed_samples
        save(root / name, Progress(DONE, 8 * DONE), run)
        losses = [train_step(run, iteration).loss for iteration in range(DONE, STEPS)]
        found[name] = max_over_world(losses, run.device), consumed
        run.optimizer.finish_param_sync()  # the gathers of a late host belong to this job
        new_job()
        before = name
    return found


@pytest.fixture(scope="module", params=KINDS)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    kind, root, found, before = request.param, tmp_path_factory.mktemp("chain"), {}, ""
    layouts = KINDS[kind].layouts
    for size, group in itertools.groupby(layouts, key=lambda name: small_run(**layouts[name]).world_size):
        names = list(group)
        found |= run_distributed(go_through, size, root, kind, names, before, timeout_s=200)[0]
        before = names[-1]
    return kind, root, found


def test_weights_and_states_are_bitwise_the_same_after_every_layout(results: Results) -> None:
    kind, root, found = results
    first, *names = found
    expected = stored_tensors(root / first / "iter_0000002")
    states = {key.split(".")[2] for key in expected if key.startswith("optimizer.state.")}
    assert states >= {"SGD": {"exp_avg", "master_low"}}.get(kind, {"exp_avg", "exp_avg_sq"})
    assert ("momentum_buffer" in states) == kind.startswith("Muon")
    is_frozen = "freeze" in KINDS[kind].changes
    assert ("optimizer.state.exp_avg.embedding.word_embeddings.weight" not in expected) is is_frozen or (
        "lora_rank" in KINDS[kind].changes
    )
    assert "lora_rank" not in KINDS[kind].changes or all(".adapters." in key for key in expected)
    for name in names:
        stored = stored_tensors(root / name / "iter_0000002")
        assert stored.keys() == expected.keys(), name
        assert [key for key in expected if not torch.equal(stored[key], expected[key])] == [], name


def test_further_steps_are_those_of_the_unbroken_run(results: Results) -> None:
    kind, _, found = results
    (unbroken, _), *_ = found.values()
    for name, (losses, consumed) in list(found.items())[1:]:
        assert consumed == 8 * DONE
        bound = 0.0 if kind in ("fp32", "Muon") and name in SAME_SUMS else KINDS[kind].bound
        assert losses == pytest.approx(unbroken, abs=bound, rel=0), name
