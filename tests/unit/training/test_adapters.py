"""Adapters: steps of one process are PEFT's, beside 4 bits too (QLoRA); dropout; bases in fewer bits.

That layouts train as one process: test_covered_layouts.py. Checkpoints: test_any_layout.py.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from distributed_runner import new_job, run_distributed
from hf_families import family_model, family_run
from nf4_oracle import rounded
from peft_oracle import factors_of, peft_steps
from safetensors.torch import load_file, save_file
from small_runs import ON_HOST, hf_llama, small_run
from training_runs import build_seeded_run

from patch.config.schema import RunConfig
from patch.convert.live_weights import iter_hf_weights
from patch.model import initialize_weights
from patch.model.linear import Column, Row
from patch.training.run_state import base_checksum
from patch.training.step import train_step

STEPS, MANY_STEPS = 2, 10
BOUND = 2e-6
"""Of losses near 5.6: sums in another order."""
LORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6}
EAGER, SDPA, BF16 = {"precision_align": "eager"}, {"precision_align": "sdpa"}, {"precision": "bf16"}
FULL = {"recompute_granularity": "full"}
SOME = {"lora_target_modules": "q_proj,v_proj,up_proj"}
DOWN = {"lora_target_modules": "down_proj", "lora_rslora": True}
NF4 = {"quantize_base": "nf4"}
SP2, EP2 = {"tp": 2, "sequence_parallel": True}, {"expert_model_parallel_size": 2}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 48, "global_batch_size": 8}
WIDE: dict[str, Any] = {
    "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 8, "kv_channels": 16, "num_layers": 2,
}  # fmt: skip
"""Rows of whole blocks."""
BESIDE_PEFT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("hf", {}),
    "some": ("hf", SOME),
    "down": ("hf", DOWN),
    "faster B": ("hf", {"lora_plus_ratio": 8.0}),
    "eager": ("hf", EAGER),
    "some, sdpa": ("hf", SOME | SDPA),
    "down, eager, bf16": ("hf", DOWN | EAGER | BF16 | FULL),
    "bloom": ("bloom", EAGER),
    "shared experts, bf16": ("qwen-2-moe", SDPA | BF16 | {"lora_target_modules": "*.shared_expert.*"}),
    "latents": ("deepseek-v2", SDPA | {"lora_target_modules": "*.self_attn.*"}),
    "joined tensors": ("phi-3", {}),
    "norms behind": ("olmo-2", {}),
    "two norms": ("glm-4", {}),
    "4 bits": ("wide", NF4),
    "4 bits in host memory": ("wide", NF4 | ON_HOST),
}
"""Folders, and changes of a run. Aligned runs have PEFT's bits. Bases of 4 bits are dequantised for PEFT."""


class Beside(NamedTuple):
    """Some steps beside PEFT's."""

    losses: list[float]
    norms: list[float]
    first: dict[str, np.ndarray]
    factors: dict[str, np.ndarray]
    base: dict[str, np.ndarray]
    """Of runs in 4 bits, Hugging Face's tensors."""
    checksum: str


def run_beside(name: str, root: Path) -> tuple[RunConfig, Path]:
    model, changes = BESIDE_PEFT[name]
    return family_run(root / model, **LORA | changes | {"train_iters": MANY_STEPS}), root / model


def run_beside_peft(rank: int, world_size: int, folder: Path) -> dict[str, Beside]:
    found = {}
    for name in BESIDE_PEFT:
        config, hf = run_beside(name, folder)
        run = build_seeded_run(config, hf)
        gradients = 4 * sum(p.numel() for p in run.optimizer.parameters)
        assert gradients <= run.optimizer.grad_buffer.num_bytes < gradients + 1024 or "host" in name
        with run.optimizer.full_weights():
            initialize_weights(run.stages, config.model, 1, adapters=True)
            first, base = factors_of(run), dict[str, np.ndarray]()
        run.optimizer.reload_model_params()
        results = [train_step(run, iteration) for iteration in range(MANY_STEPS)]
        losses, norms = ([getattr(each, part) for each in results] for part in ("loss", "grad_norm"))
        with run.optimizer.full_weights():
            factors = factors_of(run)
            if config.adapter.quantize_base:
                assert torch.uint8 in {p.dtype for p in run.stages[0].decoder.parameters()}
                weights = iter_hf_weights(run.stages, config.model, run.groups)
                base = {tensor: value.float().numpy() for tensor, value in weights}
        checksum = base_checksum(run)
        found[name] = Beside(losses, norms, first, factors, base, checksum)
        new_job()
    return found


def dequantised(folder: Path) -> dict[str, torch.Tensor]:
    """A folder's tensors, and what 4 bits leave of those of attention and MLPs."""
    tensors = load_file(folder / "model.safetensors")
    return {
        name: torch.from_numpy(rounded(tensor.numpy())) if "_proj" in name else tensor
        for name, tensor in tensors.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    hf_llama(small_run(), folder / "hf")
    for name in ("wide", "dense"):
        hf_llama(small_run(**WIDE), folder / name)
    save_file(dequantised(folder / "wide"), folder / "dense" / "model.safetensors", {"format": "pt"})
    for name in ("bloom", "qwen-2-moe", "deepseek-v2", "phi-3", "olmo-2", "glm-4"):
        family_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def beside_peft(folder: Path) -> dict[str, Beside]:
    return run_distributed(run_beside_peft, 1, folder)[0]


@pytest.mark.parametrize("name", BESIDE_PEFT)
def test_steps_of_one_process_are_those_of_peft(
    beside_peft: dict[str, Beside], folder: Path, name: str
) -> None:
    pytest.importorskip("peft")
    ours, (config, hf) = beside_peft[name], run_beside(name, folder)
    theirs = peft_steps(config, folder / "dense" if hf.name == "wide" else hf, ours.first, MANY_STEPS)
    # On CPUs with AVX2, MKL's products of these latents depend on the addresses of their operands, unless
    # MKL_CBWR=AUTO is set.
    if config.model.precision_align and (name != "latents" or "MKL_CBWR" in os.environ):
        assert ours.losses == theirs["losses"]
        assert not [n for n, values in theirs["factors"].items() if (ours.factors[n] != values).any()]
    assert ours.losses == pytest.approx(theirs["losses"], rel=1e-6)
    assert ours.norms == pytest.approx(theirs["norms"], rel=1e-5)
    for factor, expected in theirs["factors"].items():
        change = expected - ours.first[factor]
        assert np.linalg.norm(ours.factors[factor] - expected) <= 1e-4 * np.linalg.norm(change), factor


def test_base_is_the_folder_in_4_bits_wherever_it_is(beside_peft: dict[str, Beside], folder: Path) -> None:
    expected, ours = dequantised(folder / "wide"), beside_peft["4 bits"]
    assert expected.keys() == ours.base.keys()
    for tensor, values in expected.items():  # levels of the oracle are of float64
        assert np.allclose(ours.base[tensor], values, rtol=1e-6, atol=3e-7), tensor
    on_host = beside_peft["4 bits in host memory"]
    assert on_host.losses == ours.losses and on_host.checksum == ours.checksum
    assert all(np.array_equal(on_host.factors[name], each) for name, each in ours.factors.items())


def run_dropout(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, changes in {"TP": {"tp": 2}, "SP": SP2, "DP": {"dp": 2}}.items():
        for kind, further in (("plain", {}), ("full", FULL)):
            run = build_seeded_run(small_run(**LORA, lora_dropout=0.3, **changes, **further))
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
    found["aligned"] = []
    for align in ({}, EAGER):
        run = build_seeded_run(small_run(**LORA, **SP2, **align))
        found["aligned"].append([train_step(run, iteration).loss for iteration in range(STEPS)])
        new_job()
    return found | {"experts": dropout_of_experts()}


def dropout_of_experts() -> dict[str, tuple[list[np.ndarray], bool]]:
    """Masks of the first expert of each rank, and of its next layer; whether a layer evaluates without."""
    found, ones = {}, torch.ones(8, 64)
    for name, changes in {"replicas": {"dp": 2}, "EP": {"dp": 2, **EP2}, "ETP": SP2}.items():
        run = build_seeded_run(small_run(**LORA, **EXPERTS, lora_dropout=0.3, **changes))
        expert = run.stages[0].decoder.layers[1].mlp.experts.local_experts[0].linear_fc1
        torch.manual_seed(5)
        masks = [expert.adapters._with_zeros(ones).numpy() for _ in range(2)]
        for part in expert.eval().adapters.values():
            torch.nn.init.ones_(part.lora_B.weight)
        results = [expert.adapters(torch.zeros(8, len(expert.weight)), ones).detach() for _ in range(2)]
        found[name] = masks, torch.equal(*results)
        new_job()
    return found


@pytest.mark.long
def test_dropout_is_alike_where_inputs_are_comes_again_in_recomputation_and_ends_in_evaluation() -> None:
    first, second = run_distributed(run_dropout, 2)
    experts, others = first.pop("experts"), second.pop("experts")
    plain, aligned = first.pop("aligned")
    assert aligned == pytest.approx(plain, abs=BOUND)
    for name, is_alike in {"replicas": False, "EP": True, "ETP": True}.items():
        masks, is_off = experts[name]
        assert np.array_equal(masks[0], others[name][0][0]) is is_alike, "alike: of one place in EP"
        assert not np.array_equal(*masks) and is_off, "each layer has its own"
    for (name, kind), (losses, whole, (column, row)) in first.items():
        _, other_whole, (other_column, other_row) = second[name, kind]
        assert np.array_equal(whole, other_whole), "copies of a factor go the same way"
        assert np.array_equal(column, other_column) is (name == "TP")
        assert not np.array_equal(row, other_row)
        assert {*np.unique(row)} == {0, np.float32(1 / 0.7)} and 0.6 < (row > 0).mean() < 0.8
        assert losses == pytest.approx(first[name, "plain"][0], abs=BOUND)


FEWER_BITS: dict[str, dict[str, Any]] = {
    "bf16": {**LORA, "precision": "bf16"},
    "fp8": {**LORA, "precision": "fp8"},
    "fp8, all weights train": {"precision": "fp8"},
    "fp32": LORA,
    "nf4": LORA | NF4,
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
