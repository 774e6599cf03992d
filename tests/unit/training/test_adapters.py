"""Training adapters (LoRA): as PEFT does it in one process, as one process does it in any layout; resumes.

The oracle of one process is PEFT with transformers and torch's AdamW. Two steps at least: B begins as zero, so
a wrong gradient of A is first seen in the second.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import hf_llama, small_run
from training_runs import (
    build_seeded_run,
    digests,
    save,
    stored_tensors,
    token_mean,
    train_run,
)

from patch.config.schema import RunConfig
from patch.errors import CheckpointError
from patch.optimizer import learning_rate
from patch.training.run_state import Progress, find_progress, resume
from patch.training.step import train_step

STEPS = 2
BOUNDS = {"fp32": (2e-6, 2e-6, 1e-4), "bf16": (2e-2, 5e-2, 0.5), "fp8": (2e-2, 5e-2, 0.5)}
"""Of losses near 5.6; relative of norms; relative to the norms of factors and states, where Adam makes the
smallest gradients as large as others: sums in another order."""
LORA = {"lora_rank": 3, "lora_alpha": 6, "train_iters": STEPS}
"""No TP divides the rank."""
SP2 = {"tp": 2, "sequence_parallel": True}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_shared_expert_intermediate_size": 80,
    "moe_shared_expert_gate": True, "moe_layer_freq": "[0]*1+[1]*3", "moe_router_load_balancing_type": "seq_aux_loss",
    "moe_aux_loss_coeff": 0.05, "global_batch_size": 8,
}  # fmt: skip
EP2 = {"expert_model_parallel_size": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "q_lora_rank": 40, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
    "kv_channels": 24, "num_query_groups": 4, "use_rope_scaling": False, "model_type": "deepseek_v2",
}  # fmt: skip
HALF = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.5, "optimizer_offload_chunk_size": 999}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "some": {"lora_target_modules": "q_proj,v_proj,up_proj"},
    "down": {"lora_target_modules": "down_proj", "lora_rslora": True},
    "experts": EXPERTS,
    "latents": LATENT,
    "bf16": {"precision": "bf16"},
    "fp8": {"precision": "fp8"},
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP": ("llama", {"tp": 2}),
    "TP, plain messages": ("llama", {"tp": 2, "tp_comm_overlap": False}),
    "SP, full": ("llama", {**SP2, "recompute_granularity": "full"}),
    "SP, selective, fused": ("llama", {**SP2, "recompute_granularity": "selective", "gradient_accumulation_fusion": True}),
    "some, SP": ("some", {**SP2, "tp_comm_overlap": False}),
    "down, TP, selective": ("down", {"tp": 2, "recompute_granularity": "selective"}),
    "PP interleaved, full": ("llama", {"pp": 2, "stage": 1, "recompute_granularity": "full"}),
    "CP ring": ("llama", {"cp": 2, "cp_comm_type": "p2p"}),
    "CP a2a, block": ("some", {"cp": 2, "cp_comm_type": "a2a", "recompute_granularity": "full", "recompute_method": "block"}),
    "ZeRO-1, half offloaded": ("llama", {"dp": 2, "data_parallel_sharding": "optimizer", **HALF}),
    "ZeRO-2, activations offloaded": ("llama", {"dp": 2, "data_parallel_sharding": "gradients", "cpu_offloading": True}),
    "EP": ("experts", {"dp": 2, "data_parallel_sharding": "gradients", **EP2}),
    "EP over TP, ETP=1": ("experts", {**SP2, **EP2, "expert_tensor_parallel_size": 1}),
    "latents, TP": ("latents", {"tp": 2}),
    "latents, SP": ("latents", SP2),
    "bf16, SP, ZeRO-2": ("bf16", {**SP2, "data_parallel_sharding": "gradients", "recompute_granularity": "full"}),
    "fp8, TP": ("fp8", {"tp": 2}),
    "ETP=2": ("experts", {**SP2, "recompute_granularity": "full"}),
}  # fmt: skip


class Trained(NamedTuple):
    losses: list[float]
    norms: list[float]


def run_of(model: str, changes: dict[str, Any]) -> RunConfig:
    return small_run(**LORA | MODELS[model] | changes)


def train(config: RunConfig, folder: Path) -> Trained:
    run = build_seeded_run(config)
    results = train_run(run)
    save(folder, Progress(STEPS, 4 * STEPS), run.stages, run.optimizer)
    new_job()
    return Trained([result.loss for result in results], [result.grad_norm for result in results])


def train_all(rank: int, world_size: int, folder: Path) -> dict[str, Trained]:
    if world_size == 1:
        return {name: train(run_of(name, {}), folder / name) for name in MODELS}
    return {name: train(run_of(*layout), folder / name) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[int, list[dict[str, Trained]]]:
    return {size: run_distributed(train_all, size, folder) for size in (1, 2)}


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_as_in_one_process(trained: dict, folder: Path, name: str) -> None:
    model = LAYOUTS[name][0]
    one, (loss_bound, norm_bound, factor_bound) = trained[1][0][model], BOUNDS.get(model, BOUNDS["fp32"])
    for rank in trained[2]:
        assert rank[name].losses == pytest.approx(one.losses, abs=loss_bound)
        assert rank[name].norms == pytest.approx(one.norms, rel=norm_bound)
    expected, ours = (stored_tensors(folder / which / f"iter_000000{STEPS}") for which in (model, name))
    assert expected.keys() == ours.keys() and all(".adapters." in key for key in ours)
    for key, values in expected.items():
        if values.is_floating_point():
            assert (values - ours[key]).norm() <= factor_bound * values.norm(), key
