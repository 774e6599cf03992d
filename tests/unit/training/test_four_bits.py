"""Adapters beside a base in 4 bits (QLoRA): one process as PEFT beside dequantised weights, layouts as it.

Whatever the layout, the base has the same bits: those of whole Hugging Face tensors in NumPy.
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
from safetensors.torch import load_file, save_file
from small_runs import ON_HOST, ZERO_3, hf_llama, small_run
from training_runs import build_seeded_run, train_run

from patch.config.schema import RunConfig
from patch.convert.live_weights import iter_hf_weights
from patch.model import initialize_weights
from patch.training.run_state import base_checksum

STEPS = 2
BOUND = 2e-6
"""Of losses near 5.6 and norms near 0.6: sums in another order."""
QLORA: dict[str, Any] = {"lora_rank": 3, "lora_alpha": 6, "quantize_base": "nf4", "train_iters": STEPS}
SHAPE: dict[str, Any] = {
    "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 8, "kv_channels": 16, "num_layers": 2,
}  # fmt: skip
EXPERTS = {"lora_target_modules": "q_proj,v_proj", "global_batch_size": 8}
"""Whose matrices have no adapters."""
FULL, SELECTIVE = ({"recompute_granularity": each} for each in ("full", "selective"))
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "TP, selective": ("llama", {"tp": 2, **SELECTIVE}),
    "SP, full": ("llama", {"tp": 2, "sequence_parallel": True, **FULL}),
    "PP, activations offloaded": ("llama", {"pp": 2, "cpu_offloading": True}),
    "CP": ("llama", {"cp": 2, "cp_comm_type": "p2p"}),
    "EP": ("mixtral", {"dp": 2, "expert_model_parallel_size": 2, **ZERO_3}),
    "full, base in shards": ("llama", {"dp": 2, **ZERO_3, **FULL}),
    "base on the host": ("llama", {"dp": 2, **ON_HOST, "cpu_offloading_weights_fraction": 0.6}),
}
ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}), "mixtral": ("mixtral", {}), "bf16": ("llama", {"precision": "bf16"}),
    "on the host": ("llama", ON_HOST),
}  # fmt: skip


class Trained(NamedTuple):
    results: list[tuple[float, float]]
    """Loss and norm of each step, and of an evaluation after them."""
    base: dict[str, np.ndarray]
    checksum: str
    first: dict[str, np.ndarray]
    factors: dict[str, np.ndarray]


def run_of(model: str, folder: Path, changes: dict[str, Any]) -> RunConfig:
    if model == "mixtral":
        return family_run(folder / model, **QLORA, **EXPERTS, **changes)
    return small_run(**QLORA | SHAPE | changes)


def train(config: RunConfig, folder: Path) -> Trained:
    run = build_seeded_run(config, folder)
    with run.optimizer.full_weights():
        initialize_weights(run.stages, config.model, 1, adapters=True)
    run.optimizer.reload_model_params()
    first = factors_of(run)
    results = train_run(run)
    with run.optimizer.full_weights():
        weights = iter_hf_weights(run.stages, config.model, run.groups)
        base = {name: each.float().numpy() for name, each in weights}
        factors = factors_of(run)
    steps = [(result.loss, result.grad_norm) for result in results]
    kept = [parameter.dtype for parameter in run.stages[0].decoder.parameters()]
    assert kept.count(torch.uint8) >= 4 * len(run.stages[0].decoder.layers)
    trained = Trained(steps, base, base_checksum(run.stages, run.optimizer), first, factors)
    new_job()
    return trained


def train_all(rank: int, world_size: int, folder: Path) -> dict[str, Trained]:
    layouts = LAYOUTS if world_size == 2 else ALONE
    return {
        name: train(run_of(model, folder, changes), folder / model)
        for name, (model, changes) in layouts.items()
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four bits")
    hf_llama(small_run(**SHAPE), folder / "llama")
    family_model("mixtral", folder / "mixtral", intermediate_size=128)
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[int, list[dict[str, Trained]]]:
    return {size: run_distributed(train_all, size, folder) for size in (1, 2)}


def expected_base(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """A folder's tensors in a type, and what 4 bits leave of those of attention and MLPs."""
    stored = {name: tensor.to(dtype) for name, tensor in load_file(folder / "model.safetensors").items()}
    return {
        name: torch.from_numpy(rounded(tensor.float().numpy())).to(dtype) if "_proj" in name else tensor
        for name, tensor in stored.items()
    }


@pytest.mark.parametrize(("name", "dtype"), [("llama", torch.float32), ("bf16", torch.bfloat16)])
def test_base_is_the_folder_in_4_bits(trained: dict, folder: Path, name: str, dtype: torch.dtype) -> None:
    expected, ours = expected_base(folder / "llama", dtype), trained[1][0][name].base
    assert expected.keys() == ours.keys()
    bound = 1e-6 if dtype == torch.float32 else 2**-8  # levels of the oracle are of float64
    for tensor, values in expected.items():
        assert np.allclose(ours[tensor], values.float(), rtol=bound, atol=bound * 0.3), tensor


def test_steps_of_one_process_are_those_of_peft_beside_the_dequantised_weights(
    trained: dict, folder: Path
) -> None:
    pytest.importorskip("peft", reason="peft is not installed: make test installs it")
    ours, dense = trained[1][0]["llama"], folder / "dense"
    hf_llama(small_run(**SHAPE), dense)
    save_file(expected_base(folder / "llama"), dense / "model.safetensors", {"format": "pt"})
    theirs = peft_steps(run_of("llama", folder, {}), dense, ours.first, STEPS)
    losses, norms = np.transpose(ours.results[:STEPS])
    assert losses == pytest.approx(theirs["losses"], abs=1e-6)
    assert norms == pytest.approx(theirs["norms"], rel=1e-5)
    for factor, expected in theirs["factors"].items():
        change = expected - ours.first[factor]
        assert np.linalg.norm(ours.factors[factor] - expected) <= 1e-4 * np.linalg.norm(change), factor


def test_a_base_in_host_memory_changes_no_bit(trained: dict) -> None:
    expected, ours = trained[1][0]["llama"], trained[1][0]["on the host"]
    (losses, norms), (their_losses, their_norms) = (np.transpose(each.results) for each in (ours, expected))
    assert np.array_equal(losses, their_losses)
    assert norms == pytest.approx(their_norms, rel=1e-12), "sums over other buckets"
    assert ours.checksum == expected.checksum
    assert all(np.array_equal(ours.factors[name], each) for name, each in expected.factors.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_have_the_bits_of_one_process_and_train_as_it_does(trained: dict, name: str) -> None:
    one = trained[1][0][LAYOUTS[name][0]]
    for rank in (each[name] for each in trained[2]):
        assert rank.checksum == one.checksum and rank.base.keys() == one.base.keys()
        assert all(np.array_equal(values, one.base[tensor]) for tensor, values in rank.base.items())
        assert np.abs(np.subtract(rank.results, one.results)).max() < BOUND
        for factor, values in one.factors.items():
            assert np.linalg.norm(rank.factors[factor] - values) <= 1e-4 * np.linalg.norm(values), factor
