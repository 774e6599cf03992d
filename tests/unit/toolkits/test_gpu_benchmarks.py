"""The benchmarks of a GPU without one: they say so, and their shapes, counts, tables and aims are right."""

import importlib
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from small_runs import small_run
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from patch.device import MachineFacts
from toolkits.benchmarks import _gpu_tables, attention, gpu_step
from toolkits.benchmarks._attention_run import (
    CONTENDERS,
    Heads,
    _ours,
    forward_and_backward,
    num_flops,
    obstacle,
    random_tensors,
    rows_of,
)
from toolkits.benchmarks._gpu_step_run import layers_that_fit, measure, step_run

H100 = MachineFacts(
    cuda_devices=1, cpu_cores=16, cuda_memory_bytes=81559 << 20, compute_capability=(9, 0),
    cuda_name="NVIDIA H100 80GB HBM3", libraries=frozenset({"transformer_engine"}),
)  # fmt: skip
SMALL = Heads(queries=4, groups=2, size=8)


@pytest.mark.parametrize("name", ["attention", "gpu_step", "_gpu_tables"])
def test_without_a_gpu_they_are_not_run(
    name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert importlib.import_module(f"toolkits.benchmarks.{name}").main([]) == 0
    assert capsys.readouterr().out == "not run: needs a GPU, found none\n"


def test_our_attention_and_its_gradients_are_those_of_all_scores() -> None:
    tensors = random_tensors(24, 2, SMALL, torch.device("cpu"))
    found = forward_and_backward(_ours(SMALL, ()), tensors)
    query, key, value = (t.detach().double().permute(1, 2, 0, 3).requires_grad_() for t in tensors[:3])
    repeated = [t.repeat_interleave(2, dim=1) for t in (key, value)]
    scores = (query @ repeated[0].transpose(2, 3)) * SMALL.size**-0.5
    hidden = torch.ones(24, 24, dtype=torch.bool).triu(1)
    result = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ repeated[1]
    direction = tensors[3].double().permute(1, 2, 0, 3)
    expected = [result, *torch.autograd.grad(result, (query, key, value), direction)]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(
            ours.double().flatten(), theirs.permute(2, 0, 1, 3).flatten(), rtol=0.02, atol=0.02
        )


def test_flops_are_torchs_count_of_the_pairs_that_are_seen() -> None:
    shape = (2, 4, 24, 8)
    square = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    seen = 24 * 25 / 2 / 24**2
    assert num_flops(24, 2, SMALL) == pytest.approx(square * seen, rel=1e-12)
    assert rows_of(4096) == 4 and rows_of(131072) == 1


def test_contenders_name_what_they_lack_and_ours_is_the_default() -> None:
    has = {name for name in CONTENDERS if not obstacle(name)}
    assert {"cuDNN", "FlashAttention-2"} <= has
    assert attention.default_contender(H100) == "cuDNN"
    assert attention.default_contender(MachineFacts(1, 1, compute_capability=(8, 0))) == "FlashAttention-2"


def test_attention_table_and_aims() -> None:
    flops = num_flops(4096, 4, Heads())
    times = {"cuDNN": {4096: flops / 500e12 * 1e3}, "FlashAttention-2": {4096: flops / 550e12 * 1e3}}
    (aim,) = attention.aims_of(times, "cuDNN")
    assert aim.measured == pytest.approx(1.1) and not aim.is_met
    text = attention.table({**times, "Transformer Engine": {}}, [4096, 8192], H100.cuda_name)
    assert "| cuDNN | 500 (51%) | failed |" in text and "| Transformer Engine | failed | failed |" in text


def run_small(rank: int, world_size: int) -> dict:
    return measure(small_run(precision="bf16", sft=False, num_layers=1), steps=1)


def test_a_step_is_measured_with_its_dearest_operators() -> None:
    (found,) = run_distributed(run_small, 1)
    assert found["seconds"] > 0 and 4 < found["loss"] < 6 and len(found["kernels"]) == 10
    shares = [share for *_, share in found["kernels"]]
    assert shares == sorted(shares, reverse=True) and 0.2 < sum(shares) <= 1


def test_step_table_and_aims() -> None:
    layers = {8192: layers_that_fit(H100, 8192, 0.88)}
    assert 8 <= layers[8192] <= 16 and layers_that_fit(H100, 4096, 0.88) >= layers[8192]
    one = step_run("local bf16", layers[8192], 8192)
    tokens = 3 * 2 * 8192 * (layers[8192] * 218_103_808 + 4096 * 128256)  # weights of products, no norms
    pairs = 3 * layers[8192] * 4 * 32 * 128 * 8192 * 8193 / 2
    flops = tokens + pairs
    assert gpu_step.tflops("local bf16", layers[8192], 8192, 1.0) * 1e12 == pytest.approx(flops, rel=1e-9)
    assert gpu_step.contenders(H100)[:2] == ["local bf16", "TE bf16"]
    assert gpu_step.contenders(MachineFacts(1, 1)) == ["local bf16", "local fp8"]
    kernels = [("nvjet_tst", 7, 3.25, 0.5)]
    rates = {"local bf16": 480e12, "TE bf16": 500e12, "local fp8": 690e12}
    measured = {name: {"seconds": flops / rate, "kernels": kernels} for name, rate in rates.items()}
    found = {8192: {**measured, "TE fp8": None}}
    aims = gpu_step.aims_of(found, layers, H100.cuda_name)
    assert [round(aim.measured, 3) for aim in aims] == [0.99, round(700 / 690, 3), round(500 / 480, 3)]
    assert [aim.is_met for aim in aims] == [True, False, True]
    text = gpu_step.table(found, layers, H100.cuda_name)
    assert "| 480 | 48.5% |" in text and "| TE fp8 | failed |" in text
    assert "| 3.2 | 50.0% | 7 | `nvjet_tst` |" in gpu_step.kernel_tables(found)
    assert one.optimizer.optimizer_offload_policy is None


def test_sections_name_machine_versions_and_parts_that_did_not_end(tmp_path: Path) -> None:
    head = _gpu_tables.heading(H100, "23 Nov 2026")
    assert "23 Nov 2026" in head and "NVIDIA H100 80GB HBM3 (80 GiB)" in head and "torch 2." in head
    assert _gpu_tables.part_section("attention", 124, "| a |\nplot: b") == (
        "\n### attention (did not end in time)\n\n| a |\n"
    )
    assert _gpu_tables.run_part("_report", tmp_path, 60, quick=False) == (0, "")
    code, said = _gpu_tables.run_part("nothing", tmp_path, 60, quick=False)
    assert code == 1 and "No module named" in said
