"""The benchmarks of a GPU without one: they say so, and their shapes, counts, tables and aims are right."""

import importlib
import math
from pathlib import Path

import pytest
import torch
from distributed_runner import new_job, run_distributed
from small_runs import small_run
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from patch.device import MachineFacts
from toolkits.benchmarks import _gpu_tables, attention, gpu_step, offload
from toolkits.benchmarks.attention import (
    CONTENDERS,
    Heads,
    _ours,
    forward_and_backward,
    num_flops,
    obstacle,
    random_tensors,
    rows_of,
)
from toolkits.benchmarks.gpu_step import layers_that_fit, step_run

H100 = MachineFacts(
    cuda_devices=1, cpu_cores=16, cuda_memory_bytes=81559 << 20, compute_capability=(9, 0),
    cuda_name="NVIDIA H100 80GB HBM3", libraries=frozenset({"transformer_engine"}),
)  # fmt: skip
SMALL = Heads(queries=4, groups=2, size=8)


@pytest.mark.parametrize("name", ["attention", "gpu_step", "offload", "_gpu_tables"])
def test_without_a_gpu_they_are_not_run(
    name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert importlib.import_module(f"toolkits.benchmarks.{name}").main([]) == 0
    said = capsys.readouterr().out
    assert said.endswith("not run: needs a GPU, found none\n")
    assert said.startswith("PLAN, not measured" if name == "offload" else "not run")


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
    text = attention.times_table({**times, "Transformer Engine": {}}, [4096, 8192], H100.cuda_name)
    cells = {line.split("|")[1].strip(): line.replace(" ", "").split("|")[2:4] for line in text.splitlines()}
    assert cells["cuDNN"] == ["500(51%)", "failed"] and cells["Transformer Engine"] == ["failed", "failed"]


def run_small(rank: int, world_size: int) -> tuple[dict, dict]:
    """A step of `gpu_step`, and each contender of `offload` but upstream's offload, which needs CUDA."""
    from training_runs import CPU

    from patch import compat
    from toolkits.benchmarks._upstream import prepare_cpu

    compat.apply(cuda=False)
    step = gpu_step.time_steps(small_run(precision="bf16", sft=False, num_layers=1), CPU, steps=1)
    prepare_cpu()
    config = small_run(
        precision="bf16", num_layers=1, sft=False, global_batch_size=2, reduce_bucket_size=10**6,
        lr=1e-3, min_lr=1e-3, lr_warmup_iters=0,
        simulated_device_memory=10**9, optimizer_offload_auto_threshold=10**6,
    )  # fmt: skip
    found = {}
    for name in offload.CONTENDERS:
        if name.startswith("ours") or "no offload" in name:
            new_job()
            found[name] = offload.time_steps(config, CPU, name, steps=2)
    return step, found


@pytest.fixture(scope="module")
def measured() -> tuple[dict, dict]:
    return run_distributed(run_small, 1)[0]


def test_a_step_is_measured_with_its_dearest_operators(measured: tuple[dict, dict]) -> None:
    found = measured[0]
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
    text = gpu_step.step_table(found, layers, H100.cuda_name)
    assert "|480|48.5%|" in text.replace(" ", "") and "failed" in text.splitlines()[-1]
    assert "|`nvjet_tst`|3.2|50.0%|7|" in gpu_step.kernel_tables(found).replace(" ", "")
    assert one.optimizer.optimizer_offload_policy is None


def test_contenders_train_the_same_and_place_states_where_their_names_say(
    measured: tuple[dict, dict],
) -> None:
    found = measured[1]
    ours = {name.split(": ")[1]: one for name, one in found.items() if name.startswith("ours")}
    assert len({one["loss"] for one in ours.values()}) == 1
    assert {name: round(one["fraction"], 1) for name, one in ours.items()} == {
        "no offload": 0.0, "0.25": pytest.approx(0.25, abs=0.05), "0.5": 0.5, "1": 1.0, "auto": 0.0,
    }  # fmt: skip
    assert found["upstream: no offload"]["loss"] == pytest.approx(ours["no offload"]["loss"], abs=0.02)
    assert all(one["seconds"] > 0 and one["host_gib"] > 0.1 for one in found.values())


def test_ratios_are_within_a_round_and_failures_are_shown(measured: tuple[dict, dict]) -> None:
    one = measured[1].get
    rounds = {name: [dict(one(name, {}), seconds=1.0), {"seconds": 2.0}] for name in offload.CONTENDERS}
    rounds["ours: 0.25"] = [{"seconds": 1.02}, {"seconds": 2.04}]
    rounds["upstream: 0.25"] = [None, None]
    aims = offload.aims_of({"4096": rounds, "8192": rounds})
    assert [aim.is_met for aim in aims] == [True, False, True, True, False, False, True, True]
    assert math.isnan(aims[1].measured) and aims[0].measured == pytest.approx(1.02)
    lines = offload.rounds_table("4096", rounds).splitlines()
    (line,) = (line for line in lines if "upstream: 0.25" in line)
    assert line.replace(" ", "").split("|")[2:-1] == ["-", "nan", "-", "-", "-"]


def test_shapes_are_those_of_8b() -> None:
    from patch.plan.parameters import total_parameters

    whole = 32 * offload._LAYER + offload._EMBEDDINGS
    assert total_parameters(offload.offload_run(32, 4096).model) == whole == 8_030_261_248
    assert 10 < offload.default_layers(150 * 10**9) < 20
    static = offload.with_offload(offload.offload_run(2, 4096), "ours: 0.5").optimizer
    assert (static.optimizer_offload_policy, static.optimizer_offload_fraction) == ("static", 0.5)


def test_sections_name_machine_versions_and_parts_that_did_not_end(tmp_path: Path) -> None:
    head = _gpu_tables.heading(H100, "23 Nov 2026")
    assert "23 Nov 2026" in head and "NVIDIA H100 80GB HBM3 (80 GiB)" in head and "torch 2." in head
    assert _gpu_tables.part_section("attention", 124, "| a |\nplot: b") == (
        "\n### attention (did not end in time)\n\n| a |\n"
    )
    assert _gpu_tables.run_part("_report", tmp_path, 60, quick=False) == (0, "")
    code, said = _gpu_tables.run_part("nothing", tmp_path, 60, quick=False)
    assert code == 1 and "No module named" in said
