"""Whole steps of training on a GPU: where states lie changes no bit, and the results are transformers'."""

import gc
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed_runner import run_distributed
from gpu import runs
from gpu.runs import close, digest_of, needs_8_bits
from hf_families import family_model, family_run
from small_runs import ON_HOST, hf_llama, small_run
from training_runs import CPU, build_seeded_run, transformers_steps

from patch.amax import noted_amax
from patch.device import DeviceContext
from patch.model import initialize_weights
from patch.training.evaluation import evaluate
from patch.training.setup import Run
from patch.training.state_placement import OomRetry
from patch.training.step import train_step

STEPS = 8
SMALL = {"train_iters": STEPS, "reduce_bucket_size": 40_000, "optimizer_offload_chunk_size": 9_999}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "static 0.3": {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.3},
    "static 1": {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 1.0},
    "auto": {"optimizer_offload_policy": "auto"},
    "on a disk": {
        "optimizer_offload_policy": "static", "offload_folder": tempfile.gettempdir(),
        "optimizer_offload_host_share": 0.0,
    },
}  # fmt: skip
WEIGHTS: dict[str, dict[str, Any]] = {
    "none": {},
    "all": ON_HOST,
    "half": ON_HOST | {"cpu_offloading_weights_fraction": 0.5},
    "all, states on a disk": ON_HOST | {key: POLICIES["on a disk"][key] for key in
                                        ("offload_folder", "optimizer_offload_host_share")},
}  # fmt: skip
"""On the host."""
CASES: dict[str, dict[str, Any]] = {
    "fp32, clipped": {"precision": "fp32", "clip_grad": 0.05},
    "bf16, not clipped": {"precision": "bf16", "clip_grad": 1e3},
    "bf16, sometimes clipped": {"precision": "bf16", "clip_grad": 3.0, "main_grads_dtype": "bf16"},
    "bf16 moments": {"precision": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "8-bit moments": {
        "precision": "bf16", "exp_avg_dtype": "8bit", "exp_avg_sq_dtype": "8bit", "ffn_hidden_size": 192,
    },
    "fp16, overflows": {"precision": "fp16", "initial_loss_scale": 2.0**21, "loss_scale_window": 3},
}  # fmt: skip
LARGE = {
    "hidden_size": 1024, "ffn_hidden_size": 4096, "kv_channels": 256, "num_layers": 8, "precision": "bf16",
    "seq_length": 512, "max_padding_length": 512, "deterministic_mode": True,
}  # fmt: skip
"""Layers whose activations count."""


def build(job: DeviceContext, folder: Path | None = None, **changes: Any) -> Run:
    return runs.build(job, folder, **SMALL | changes)


def train(run: Run, first: int = 0, last: int = STEPS) -> list:
    """Loss, norm and whether it was skipped, of each step; the loss of an evaluation; the weights' digest.

    Where weights are on the host buckets end at layers, so the last digits of a norm are of other sums.
    """
    results = [train_step(run, iteration) for iteration in range(first, last)]
    steps = [(result.loss, f"{result.grad_norm:.13g}", result.skipped) for result in results]
    return [*steps, evaluate(run)["valid_loss"], digest_of(run)]


@pytest.mark.parametrize("case", CASES)
def test_placement_changes_no_bit(job: DeviceContext, deterministic: None, case: str) -> None:
    found, fractions = {}, {}
    for name, policy in POLICIES.items():
        run = build(job, deterministic_mode=True, **CASES[case] | policy)
        begin = run.optimizer.adam.manager.offload_fraction
        found[name] = train(run)
        fractions[name] = begin, run.optimizer.adam.manager.offload_fraction
        close(run)
    assert not differences(found)
    assert fractions["static 0.3"] == (pytest.approx(0.3, abs=0.05),) * 2
    assert fractions["static 1"] == (1.0, 1.0) and fractions["auto"] == (1.0, 0.0)
    if case.startswith("fp16"):
        assert {step[2] for step in found["none"][:-2]} == {0, 1}


@pytest.mark.parametrize("case", CASES)
def test_weights_on_the_host_change_no_bit(job: DeviceContext, deterministic: None, case: str) -> None:
    """Of one micro-batch a step: several are added up by a product's epilogue, or in staging buffers."""
    found = {}
    for name, place in WEIGHTS.items():
        run = build(job, deterministic_mode=True, **CASES[case] | place | {"global_batch_size": 2})
        found[name] = train(run)
        close(run)
    assert not differences(found)


def differences(found: dict[str, list]) -> dict[str, tuple]:
    """By name: the first of its results that the first run does not have, where there is one."""
    first, found_first = next(iter(found.values())), {}
    for name, results in found.items():
        pairs = enumerate(zip(results, first, strict=True))
        if (where := next(((index, *pair) for index, pair in pairs if pair[0] != pair[1]), None)) is not None:
            found_first[name] = where
    return found_first


def test_losses_are_those_of_transformers_and_torch_adamw(job: DeviceContext, tmp_path: Path) -> None:
    config = small_run(train_iters=STEPS)
    hf_llama(config, tmp_path)
    run = build(job, tmp_path)
    ours = [step[0] for step in train(run)[:STEPS]]
    close(run)
    assert ours == pytest.approx(transformers_steps(config, tmp_path, job.device)[0], rel=1e-4)


LORA = {"lora_rank": 4, "lora_alpha": 8, "lr": 1e-2}
LIKE_A_CPU: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, {}) for name in ("bloom", "mixtral", "qwen-2-moe", "deepseek-v2", "deepseek-v2-lite")
} | {
    "adapters": ("llama-3.1", LORA),
    "adapters of experts": ("qwen-3-moe", LORA),
    "adapters, half on the host": ("llama-3.1", LORA | POLICIES["static 0.3"]),
    "beside 4 bits": ("llama-3.1", LORA | {"quantize_base": "nf4"}),
}
"""The family, and changes of the run."""
WIDE = {"intermediate_size": 128}
"""Rows of whole blocks."""


def losses_of_families(rank: int, world_size: int, folder: Path) -> dict[str, list[float]]:
    """In a process of the CPU."""
    return {name: losses_of_family(CPU, folder, name) for name in LIKE_A_CPU}


def losses_of_family(context: DeviceContext, folder: Path, name: str, **changes: Any) -> list[float]:
    family, own = LIKE_A_CPU[name]
    if not (folder / name).exists():
        family_model(family, folder / name, **WIDE if "quantize_base" in own else {})
    config = family_run(folder / name, **SMALL | own | changes)
    run = build_seeded_run(config, folder / name, context)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # adapters are drawn on the device
        for factor in run.stages[0].parameters() if config.adapter.lora_rank else ():
            if factor.requires_grad:
                factor.copy_(torch.randn(factor.shape, generator=generator) / 8)
    run.optimizer.reload_model_params()
    found = runs.losses_of(run)
    close(run)
    return found


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[float]]]:
    """The folders of models, and the losses there."""
    folder = tmp_path_factory.mktemp("families")
    return folder, run_distributed(losses_of_families, 1, folder)[0]


@pytest.mark.parametrize("name", LIKE_A_CPU)
def test_losses_are_those_of_a_cpu(
    job: DeviceContext, on_the_cpu: tuple[Path, dict[str, list[float]]], name: str
) -> None:
    """Where they are transformers' and PEFT's."""
    folder, expected = on_the_cpu
    assert losses_of_family(job, folder, name) == pytest.approx(expected[name], rel=1e-4)
    in_16_bits = losses_of_family(job, folder, name, precision="bf16")
    assert in_16_bits == pytest.approx(expected[name], abs=0.03)


BF16 = {"precision": "bf16"}
ALIKE: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    f"{backend}, {recompute} recomputation": (
        BF16, {**BF16, "attention_backend": backend, "recompute_granularity": recompute}, 0.02
    )
    for backend in ("flash", "fused", "local", "unfused")
    for recompute in ("selective", "full")
} | {
    f"sums in the epilogue, {stage}": (
        {**BF16, "data_parallel_sharding": stage, "gradient_accumulation_fusion": False},
        {**BF16, "data_parallel_sharding": stage, "gradient_accumulation_fusion": True}, 5e-3,
    )
    for stage in ("none", "optimizer", "gradients")
}  # fmt: skip
"""Two runs, and the bound on the difference of losses near 5.6 over five steps."""
IN_8_BITS = {"precision": "fp8"}


@pytest.mark.parametrize("case", ALIKE)
def test_kernels_learn_alike(job: DeviceContext, case: str) -> None:
    one, other, bound = ALIKE[case]
    assert runs.train(job, **other) == pytest.approx(runs.train(job, **one), abs=bound)


@needs_8_bits
def test_8_bit_steps_are_close_to_those_of_bf16(job: DeviceContext) -> None:
    """On the CPU fp8 is within 0.016 of bf16."""
    assert runs.train(job, **IN_8_BITS) == pytest.approx(runs.train(job, **BF16), abs=0.05)


@needs_8_bits
def test_numbers_that_swiglu_noted_change_no_bit(job: DeviceContext, deterministic: None) -> None:
    """Three casts of a layer need no search: in forward, in backward, and of what is recomputed."""
    found, searches = [], []
    for noted in (noted_amax, lambda matrix: None):
        run = build(job, **IN_8_BITS, recompute_granularity="selective")
        with pytest.MonkeyPatch.context() as patch, torch.profiler.profile() as profile:
            patch.setattr("patch.model.fp8.kernels.noted_amax", noted)
            found.append([*runs.losses_of(run, last=2), digest_of(run)])
        searches.append(sum(each.count for each in profile.key_averages() if "_amax_tile" in each.key))
        close(run)
    assert found[0] == found[1]
    assert searches[1] - searches[0] == 2 * 3 * run.config.num_micro_batches * run.config.model.num_layers


def test_offloaded_activations_change_no_bit_and_free_memory(job: DeviceContext) -> None:
    """Of eight layers two are on the device at a time, and copies overlap with compute."""
    found, peaks = [], []
    for changes in ({}, {"cpu_offloading": True}):
        run = build(job, **LARGE, **changes)
        train_step(run, 0)
        torch.cuda.reset_peak_memory_stats()
        result = train_step(run, 1)
        peaks.append(torch.cuda.max_memory_allocated())
        found.append((result.loss, result.grad_norm, digest_of(run)))
        if run.activation_offload is not None:
            sent = run.activation_offload.pop_bytes() / 2 / run.config.num_micro_batches
            assert run.activation_offload.pop_wait_ms() >= 0
        close(run)
        del run
        gc.collect()  # or its memory would be in the next one's peak
    assert found[0] == found[1]
    assert peaks[0] - peaks[1] > 0.7 * sent


WAITS = ["async_collectives.py", "grad_norm.py"]
"""Where the host reads the losses, and before them the norm."""


@pytest.mark.parametrize(
    "changes",
    [{"data_parallel_sharding": stage} for stage in ("none", "optimizer", "gradients")]
    + [POLICIES["static 0.3"], ON_HOST, {"cpu_offloading": True}],
    ids=str,
)
def test_a_step_waits_for_the_device_only_to_read_norm_and_loss(
    job: DeviceContext, changes: dict[str, Any]
) -> None:
    """Torch warns at each operation that makes the host wait."""
    run = build(job, **BF16, **changes)
    for iteration in range(3):
        train_step(run, iteration)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train_step(run, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        close(run)
    waits = [Path(found.filename).name for found in caught if "synchronizing" in str(found.message)]
    is_on_host = "cpu_offloading_weights" in changes  # the host computes their norm: it waits for the last
    assert sorted(waits) == WAITS + ["grad_norm.py"] * is_on_host


def test_a_norm_is_exact_and_copies_no_gradients(job: DeviceContext) -> None:
    run = build(job, hidden_size=1024, ffn_hidden_size=4096, kv_channels=256, clip_grad=0.0)
    train_step(run, 0)
    run.optimizer.finish_param_sync()
    shards = [bucket.shard for bucket in run.optimizer.grad_buffer.buckets]  # their padding is zero
    expected = torch.cat(shards).double().norm().item()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert run.optimizer.get_grad_norm() == pytest.approx(expected, rel=1e-12)
    assert torch.cuda.max_memory_allocated() - before < sum(shard.nbytes for shard in shards) / 100
    close(run)


def test_out_of_memory_moves_states_and_repeats_the_work(job: DeviceContext, deterministic: None) -> None:
    large = {
        "hidden_size": 1024, "ffn_hidden_size": 4096, "kv_channels": 256, "train_iters": 3,
        "reduce_bucket_size": 10_000_000, "optimizer_offload_chunk_size": 5_000_000,
    }  # fmt: skip
    static = {"optimizer_offload_policy": "static", "optimizer_offload_fraction": 0.0}
    run = build(job, precision="bf16", **large)
    expected = train(run, last=3)
    close(run)
    del run
    run = build(job, precision="bf16", **large, **static)
    train_step(run, 0)
    run.optimizer.finish_param_sync()
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved() + (64 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(0).total_memory)
    try:
        retry = OomRetry(run.optimizer, "the test")
        for _ in retry.attempts():
            with retry.computing():
                torch.empty(200 << 20, dtype=torch.uint8, device="cuda")
            retry.start_agreement()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert 0 < run.optimizer.adam.manager.offload_fraction < 1
    assert train(run, 1, 3) == expected[1:]
    close(run)


def test_random_weights_are_repeatable_and_of_the_size_asked_for(job: DeviceContext) -> None:
    run = build(job, init_method_std=0.05)
    weights = [parameter.detach().clone() for parameter in run.stages[0].parameters()]
    initialize_weights(run.stages, run.config.model, run.config.training.seed)
    again = run.stages[0].parameters()
    close(run)
    assert all(torch.equal(*pair) for pair in zip(weights, again, strict=True))
    embedding = run.stages[0].embedding.word_embeddings.weight
    assert embedding[:250].std().item() == pytest.approx(0.05, rel=0.02)
