"""Training adapters (LoRA): as PEFT does it in one process, as one process does it in any layout; resumes.

The oracle of one process is PEFT in Hugging Face's own Trainer, over ten steps. Others take two at least: B
begins as zero, so a wrong gradient of A is first seen in the second.

Twelve faults of other implementations, and the tests that fail with each; those of other files are named:

    1   a save keeps one shard of TP          test_adapters_train_as_in_one_process[TP]
    2   added twice, cut off from autograd    unit/model/test_adapters.py; here [ETP=2], [EP over TP, ETP=1]
    3   gradients summed over another group   [EP], [EP over TP, ETP=1], [ETP=2]
    4   fused gradients miss a sum            [SP, selective, fused], in the second step
    5   a part of merged layers is a target   [some, SP], [down, TP, selective]; unit/convert/test_adapters.py
    6   another number of replicas            test_a_checkpoint_of_adapters_resumes_at_any_layout
    7   a merge in bf16                       unit/convert: test_merge_rounds_once
    8   resume without step or moments        test_a_checkpoint_of_adapters_resumes; end_to_end/
    9   experts in one tensor                 unit/convert: test_live_adapters_are_the_folders
    10  a loader finds no module              unit/convert: test_written_adapter_gives_pefts_model_the_logits
    11  order of q, k, v; sums; tokens        test_steps_of_one_process_are_those_of_peft; [SP, full]
    12  a base in few bits made dense         test_four_bits.py, unit/model/test_four_bits.py
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from nf4_oracle import rounded
from peft_oracle import factors_of, peft_steps
from small_runs import HALF, ZERO_3, hf_llama, small_run
from training_runs import (
    build_seeded_run,
    digests,
    save,
    stored_tensors,
    train_run,
)

from patch.config.schema import RunConfig
from patch.errors import CheckpointError
from patch.model import initialize_weights
from patch.model.linear import Column, Row
from patch.training.run_state import Progress, find_progress, resume
from patch.training.step import train_step

STEPS, MANY_STEPS = 2, 10
BOUND, FACTOR_BOUND = 2e-6, 1e-4
"""Of losses near 5.6, and relative of norms; relative to the norms of factors and states, as Adam makes the
smallest gradients as large as others: sums in another order."""
LORA = {"lora_rank": 3, "lora_alpha": 6, "train_iters": STEPS}
"""No TP divides the rank."""
SP2 = {"tp": 2, "sequence_parallel": True}
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "moe_ffn_hidden_size": 48, "moe_shared_expert_intermediate_size": 80,
    "moe_shared_expert_gate": True, "moe_layer_freq": "[0]*1+[1]*3", "moe_aux_loss_coeff": 0.05,
    "moe_router_load_balancing_type": "seq_aux_loss", "global_batch_size": 8,
}  # fmt: skip
EP2 = {"expert_model_parallel_size": 2}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 24, "q_lora_rank": 40, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12,
    "kv_channels": 24, "num_query_groups": 4, "use_rope_scaling": False, "model_type": "deepseek_v2",
}  # fmt: skip
CHUNKS = HALF | {"optimizer_offload_chunk_size": 999}
ROWS_OF_FOUR = {"max_padding_length": 4, "micro_batch_size": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "some": {"lora_target_modules": "q_proj,v_proj,up_proj"},
    "down": {"lora_target_modules": "down_proj", "lora_rslora": True},
    "experts": EXPERTS,
    "early": {**EXPERTS, "moe_layer_freq": "[1]*2+[0]*2", "lora_target_modules": "*.experts.*"},
    "latents": LATENT,
    "few": {**EXPERTS, "num_layers": 1, "moe_layer_freq": "1", **ROWS_OF_FOUR},
}
"""few: rows of four tokens; some experts have none."""
FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
ZERO2 = {"data_parallel_sharding": "gradients"}
EAGER, SDPA, BF16 = {"precision_align": "eager"}, {"precision_align": "sdpa"}, {"precision": "bf16"}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP": ("llama", {"tp": 2}),
    "SP, full": ("llama", {**SP2, **FULL}),
    "SP, selective, fused": ("llama", {**SP2, **SELECTIVE, "gradient_accumulation_fusion": True}),
    "some, SP": ("some", {**SP2, "tp_comm_overlap": False}),
    "SP, aligned": ("llama", {**SP2, **EAGER}),
    "down, TP, selective": ("down", {"tp": 2, **SELECTIVE}),
    "PP, a stage without adapters": ("early", {"pp": 2}),
    "CP ring": ("llama", {"cp": 2, "cp_comm_type": "p2p"}),
    "ZeRO-1, half offloaded": ("llama", {"dp": 2, "data_parallel_sharding": "optimizer", **CHUNKS}),
    "ZeRO-2, activations offloaded": ("llama", {"dp": 2, **ZERO2, "cpu_offloading": True}),
    "ZeRO-3, activations offloaded": ("some", {"dp": 2, **ZERO_3, "cpu_offloading": True}),
    "ZeRO-3, full": ("llama", {"dp": 2, **ZERO_3, **FULL}),
    "EP": ("experts", {"dp": 2, **ZERO2, **EP2}),
    "EP over TP, ETP=1": ("experts", {**SP2, **EP2, "expert_tensor_parallel_size": 1}),
    "ETP=2": ("experts", {**SP2, **FULL}),
    "few, EP": ("few", {"dp": 2, **EP2, **ZERO_3}),
    "latents, TP": ("latents", {"tp": 2}),
    "latents, SP": ("latents", SP2),
}

BESIDE_PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: ("hf", MODELS[name]) for name in ("llama", "some", "down")},
    "eager": ("hf", EAGER),
    "some, sdpa": ("hf", MODELS["some"] | SDPA),
    "down, eager, bf16": ("hf", MODELS["down"] | EAGER | BF16 | FULL),
    "bloom": ("bloom", EAGER),
    "shared experts, bf16": ("qwen-2-moe", SDPA | BF16 | {"lora_target_modules": "*.shared_expert.*"}),
    "latents": ("deepseek-v2", SDPA | {"lora_target_modules": "*.self_attn.*"}),
}
"""Folders, and changes of a run. Aligned ones have PEFT's bits."""


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


def run_beside(name: str, root: Path) -> tuple[RunConfig, Path]:
    model, changes = BESIDE_PEFT[name]
    return family_run(root / model, **LORA | changes | {"train_iters": MANY_STEPS}), root / model


def run_beside_peft(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    found = {}
    for name in BESIDE_PEFT:
        config, hf = run_beside(name, folder)
        run = build_seeded_run(config, hf)
        gradients = 4 * sum(p.numel() for p in run.optimizer.parameters)
        assert gradients <= run.optimizer.grad_buffer.num_bytes < gradients + 1024
        with run.optimizer.full_weights():
            initialize_weights(run.stages, config.model, 1, adapters=True)
        run.optimizer.reload_model_params()
        first = factors_of(run)
        results = [train_step(run, iteration) for iteration in range(MANY_STEPS)]
        run.optimizer.finish_param_sync()
        found[name] = {
            "losses": [result.loss for result in results], "norms": [result.grad_norm for result in results],
            "first": first, "factors": factors_of(run),
        }  # fmt: skip
        new_job()
    return found


@pytest.fixture(scope="module")
def beside_peft(folder: Path) -> dict[str, Any]:
    hf_llama(small_run(), folder / "hf")
    for name in ("bloom", "qwen-2-moe", "deepseek-v2"):
        family_model(name, folder / name)
    return run_distributed(run_beside_peft, 1, folder)[0]


@pytest.mark.parametrize("name", BESIDE_PEFT)
def test_steps_of_one_process_are_those_of_peft(beside_peft: dict[str, Any], folder: Path, name: str) -> None:
    pytest.importorskip("peft")
    ours, (config, hf) = beside_peft[name], run_beside(name, folder)
    theirs = peft_steps(config, hf, ours["first"], MANY_STEPS)
    if config.model.precision_align:
        assert ours["losses"] == theirs["losses"]
        assert not [n for n, values in theirs["factors"].items() if (ours["factors"][n] != values).any()]
    assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
    for factor, expected in theirs["factors"].items():
        change = expected - ours["first"][factor]
        assert np.linalg.norm(ours["factors"][factor] - expected) <= 1e-4 * np.linalg.norm(change), factor


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_as_in_one_process(trained: dict, folder: Path, name: str) -> None:
    model = LAYOUTS[name][0]
    one = trained[1][0][model]
    for rank in trained[2]:
        assert rank[name].losses == pytest.approx(one.losses, abs=BOUND)
        assert rank[name].norms == pytest.approx(one.norms, rel=BOUND)
    expected, ours = (stored_tensors(folder / which / f"iter_000000{STEPS}") for which in (model, name))
    assert expected.keys() == ours.keys() and all(".adapters." in key for key in ours)
    for key, values in expected.items():
        assert (values - ours[key]).norm() <= FACTOR_BOUND * values.norm(), key


def resume_all(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A step after the checkpoint of one process, of a run that goes on and of resumed ones; another base."""
    found: dict[str, Any] = {}
    layouts = {name: (name, {}) for name in ("llama", "early")} if world_size == 1 else RESUMED
    for name, (model, changes) in layouts.items():
        run = build_seeded_run(run_of(model, {**changes, "train_iters": STEPS + 1}))
        resume(folder / model, find_progress(folder / model), run.stages, run.optimizer, 0)
        save(folder / f"resumed {name}", Progress(STEPS, 4 * STEPS), run.stages, run.optimizer)
        found[name] = train_step(run, STEPS).loss
        new_job()
    run = build_seeded_run(run_of("llama", {"seed": 1, **({"tp": 2} if world_size > 1 else {})}))
    before = digests(run)
    with pytest.raises(CheckpointError, match="adapters of weights with checksum [0-9a-f]{16}, .*--load"):
        resume(folder / "llama", find_progress(folder / "llama"), run.stages, run.optimizer, 0)
    assert digests(run) == before
    new_job()
    return found


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "SP": ("llama", SP2),
    "PP interleaved": ("llama", {"pp": 2, "stage": 1}),
    "ZeRO-2": ("llama", {"dp": 2, **ZERO2, **CHUNKS}),
    "ZeRO-3": ("llama", {"dp": 2, **ZERO_3}),
    "a stage without": ("early", {"pp": 2}),
}


def test_a_checkpoint_of_adapters_resumes_at_any_layout_beside_its_own_base_alone(
    trained: dict, folder: Path
) -> None:
    (again,), ranks = (run_distributed(resume_all, size, folder) for size in (1, 2))
    models = {name: model for name, (model, _) in RESUMED.items()}
    for name, model in ({name: name for name in again} | models).items():
        expected = stored_tensors(folder / model / f"iter_000000{STEPS}")
        ours = stored_tensors(folder / f"resumed {name}" / f"iter_000000{STEPS}")
        assert all(torch.equal(values, ours[key]) for key, values in expected.items())
    losses = [max(rank[name] for rank in ranks) for name in models]
    assert losses == pytest.approx([again[model] for model in models.values()], abs=2e-6)


def run_dropout(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, changes in {"TP": {"tp": 2}, "SP": SP2, "DP": {"dp": 2}}.items():
        for kind, further in (("plain", {}), ("full", FULL)):
            run = build_seeded_run(run_of("llama", {"lora_dropout": 0.3, **changes, **further}))
            losses = [train_step(run, iteration).loss for iteration in range(STEPS)]
            run.optimizer.finish_param_sync()
            attention = run.stages[0].decoder.layers[0].self_attention
            whole = attention.linear_qkv.adapters["q_proj"].lora_A.weight
            masks = [
                layer.adapters._with_zeros(torch.ones(8, 100)).numpy()
                for layer in (attention.linear_qkv, attention.linear_proj)
            ]
            found[name, kind] = losses, whole.detach().numpy().copy(), masks
            new_job()
    return found


def run_dropout_of_experts(rank: int, world_size: int) -> dict[str, Any]:
    """Masks of the first expert of each rank, and of its next layer; results of a layer that evaluates."""
    found: dict[str, Any] = {}
    ones = torch.ones(8, 64)
    for name, changes in {"replicas": {"dp": 2}, "EP": {"dp": 2, **EP2}, "ETP": SP2}.items():
        run = build_seeded_run(run_of("experts", {"lora_dropout": 0.3, **changes}))
        expert = run.stages[0].decoder.layers[1].mlp.experts.local_experts[0].linear_fc1
        torch.manual_seed(5)
        found[name] = [expert.adapters._with_zeros(ones).numpy() for _ in range(2)]
        for part in expert.eval().adapters.values():
            torch.nn.init.ones_(part.lora_B.weight)
        results = [expert.adapters(torch.zeros(8, len(expert.weight)), ones).detach() for _ in range(2)]
        found[name, "evaluated"] = torch.equal(*results)
        new_job()
    return found


def test_dropout_of_experts_differs_where_their_tokens_do_and_ends_in_evaluation() -> None:
    first, second = run_distributed(run_dropout_of_experts, 2)
    for name, is_alike in {"replicas": False, "EP": True, "ETP": True}.items():
        assert np.array_equal(first[name][0], second[name][0]) is is_alike, "alike: of one place in EP"
        assert not np.array_equal(*first[name]), "each layer has its own"
        assert first[name, "evaluated"]


def test_dropout_is_alike_where_inputs_are_and_comes_again_in_recomputation() -> None:
    first, second = run_distributed(run_dropout, 2)
    for (name, kind), (losses, whole, (column, row)) in first.items():
        others = second[name, kind]
        assert np.array_equal(whole, others[1]), "copies of a factor go the same way"
        assert np.array_equal(column, others[2][0]) is (name == "TP")
        assert not np.array_equal(row, others[2][1])
        assert {*np.unique(row)} == {0, np.float32(1 / 0.7)} and 0.6 < (row > 0).mean() < 0.8
        assert losses == pytest.approx(first[name, "plain"][0], abs=BOUND)


FEWER_BITS: dict[str, dict[str, Any]] = {
    "bf16": {**LORA, "precision": "bf16"},
    "fp8": {**LORA, "precision": "fp8"},
    "fp8, all weights train": {"precision": "fp8"},
    "fp32": LORA,
    "nf4": {**LORA, "quantize_base": "nf4"},
    "fp32, rounded to nf4": LORA,
}


def first_step(name: str) -> list[np.ndarray]:
    """The loss, and the gradients of what the second of four layers gives; B is zero."""
    run, found = build_seeded_run(small_run(**FEWER_BITS[name], ffn_hidden_size=192)), list[np.ndarray]()
    for layer in run.stages[0].decoder.modules():
        if "rounded" in name and isinstance(layer, (Column, Row)):
            layer.weight.data.copy_(torch.from_numpy(rounded(layer.weight.numpy())))
    second = run.stages[0].decoder.layers[1]
    second.register_forward_hook(
        lambda layer, inputs, output: (
            output[0].register_hook(lambda gradient: found.append(gradient.float().numpy())) and None
        )
    )
    loss = train_step(run, 0).loss
    new_job()
    return [np.array(loss), *found]


def first_steps(rank: int, world_size: int) -> dict[str, list[np.ndarray]]:
    return {name: first_step(name) for name in FEWER_BITS}


def test_a_base_in_fewer_bits_is_multiplied_as_such_forward_and_backward() -> None:
    (found,) = run_distributed(first_steps, 1)
    for ours, same, other, bound in (
        ("fp8", "fp8, all weights train", "bf16", 0),
        ("nf4", "fp32, rounded to nf4", "fp32", 2e-6),
    ):
        assert len(found[ours]) == 3
        for values, expected, dense in zip(found[ours], found[same], found[other], strict=True):
            assert np.abs(values - expected).max() <= bound * np.abs(expected).max()
            assert np.abs(values - dense).max() > 20 * bound * np.abs(dense).max()
