"""The benchmarks of a GPU without one: they say so, and their shapes, counts, tables and aims are right."""

import math
import re
from pathlib import Path

import pytest
import torch
from distributed_runner import run_distributed
from small_runs import small_run
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan.parameters import total_parameters
from toolkits.benchmarks import _gpu_tables, attention, gpu_step, offload
from toolkits.benchmarks.__main__ import main
from toolkits.benchmarks.attention import Heads
from toolkits.benchmarks.gpu_step import Recipe, Steps, step_run

pytestmark = pytest.mark.long

H100 = MachineFacts(
    cuda_devices=1, cpu_cores=16, cuda_memory_bytes=81559 << 20, compute_capability=(9, 0),
    cuda_name="NVIDIA H100 80GB HBM3", libraries=frozenset({"transformer_engine"}),
)  # fmt: skip
SMALL = Heads(queries=4, groups=2, size=8)


@pytest.mark.parametrize("name", ["attention", "gpu_step", "offload", ""])
def test_without_a_gpu_they_are_not_run(
    name: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert (main([name]) if name else _gpu_tables.main([])) == 0
    assert capsys.readouterr().out == "not run: needs a GPU, found none\n"


def test_our_attention_and_its_gradients_are_those_of_all_scores() -> None:
    tensors = attention.random_tensors(24, 2, SMALL, torch.device("cpu"))
    found = attention.forward_and_backward(attention.by_torch(SMALL), tensors)
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


def test_attention_table_and_aims() -> None:
    """FLOPs are torch's count of the pairs that are seen."""
    shape = (4, 4, 4096, 8)
    square = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert attention.num_flops(4096, SMALL) == pytest.approx(square * 4097 / 2 / 4096, rel=1e-12)
    assert attention.rows_of(131072) == 1
    assert attention.default_contender(H100) == "cuDNN"
    assert attention.default_contender(MachineFacts(1, 1, compute_capability=(8, 0))) == "FlashAttention-2"
    flops = attention.num_flops(4096)
    times = {"cuDNN": {4096: flops / 500e12 * 1e3}, "FlashAttention-2": {4096: flops / 550e12 * 1e3}}
    (aim,) = attention.aims_of(times, "cuDNN")
    assert aim.measured == pytest.approx(1.1) and not aim.is_met
    text = attention.times_table({**times, "Transformer Engine": {}}, [4096, 8192], H100.cuda_name)
    cells = {line.split("|")[1].strip(): line.replace(" ", "").split("|")[2:4] for line in text.splitlines()}
    assert cells["cuDNN"] == ["500(51%)", "failed"] and cells["Transformer Engine"] == ["failed", "failed"]


def run_small(rank: int, world_size: int) -> dict[str, dict]:
    """Steps of the contenders of `offload` in bf16, but others' offload, which needs CUDA; one more fails."""
    from training_runs import CPU

    from patch import compat
    from toolkits.benchmarks._contenders import prepare_cpu

    compat.apply(cuda=False)
    prepare_cpu()
    gpu_step.step_run = lambda recipe, layers, sequence: _small(recipe)
    names = {"upstream: no offload"} | {name for name in offload.CONTENDERS if name.startswith("ours")}
    alike = sorted(name for name in names if "fp8" not in name)
    recipes = {name: offload.CONTENDERS[name] for name in alike}
    odd = Recipe({"cp_comm_type": "telepathy"})
    measured = gpu_step.measure(CPU, recipes | {"odd": odd}, 0, 0, 2, 1)
    assert measured.pop("odd") == [None]
    return {name: found for name, (found,) in measured.items()}


def _small(recipe: Recipe) -> RunConfig:
    return small_run(
        precision="bf16", num_layers=1, sft=False, global_batch_size=2, reduce_bucket_size=10**6,
        lr=1e-3, min_lr=1e-3, lr_warmup_iters=0, simulated_device_memory=10**9,
        optimizer_offload_auto_threshold=10**6, **recipe.fields,
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured() -> dict[str, dict]:
    return run_distributed(run_small, 1)[0]


def test_contenders_train_the_same_and_place_states_where_their_names_say(measured: dict[str, dict]) -> None:
    ours = {name.split(": ")[1]: one for name, one in measured.items() if name.startswith("ours")}
    assert len({one["loss"] for one in ours.values()}) == 1
    assert {name: round(one["fraction"], 1) for name, one in ours.items()} == {
        "no offload": 0.0, "0.25": pytest.approx(0.25, abs=0.05), "1": 1.0, "auto": 0.0, "weights": 1.0,
    }  # fmt: skip
    assert measured["upstream: no offload"]["loss"] == pytest.approx(ours["no offload"]["loss"], abs=0.02)
    for one in measured.values():
        assert one["seconds"] > 0 and one["host_gib"] > 0.1
        shares = [float(found) for found in re.findall(r"(?m)^.*?([\d.]+)%", one["kernels"])]
        assert len(shares) == 10 and shares == sorted(shares, reverse=True) and 20 < sum(shares) <= 100


def test_step_table_and_aims() -> None:
    layers = gpu_step.layers_that_fit(H100, 8192, 0.88)
    assert 8 <= layers <= 16 and gpu_step.layers_that_fit(H100, 4096, 0.88) >= layers
    assert total_parameters(step_run(Recipe(), 32, 4096).model) == 8_030_261_248
    tokens = 3 * 2 * 8192 * (layers * 218_103_808 + 4096 * 128256)  # weights of products, no norms
    flops = tokens + 3 * layers * 4 * 32 * 128 * 8192 * 8193 / 2
    rates = {"local bf16": 480e12, "TE bf16": 500e12, "local fp8": 690e12}
    rounds = {name: [{"seconds": flops / rate, "gpu_gib": 60.0}] for name, rate in rates.items()}
    steps = Steps(8192, layers, {**rounds, "TE fp8": [None]})
    assert steps.tflops("local bf16") == pytest.approx(480, rel=1e-9)
    aims = gpu_step.aims_of(steps, H100.cuda_name)
    assert [round(aim.measured, 3) for aim in aims] == [0.99, round(700 / 690, 3), round(500 / 480, 3)]
    assert [aim.is_met for aim in aims] == [True, False, True]
    text = steps.table("TE bf16", H100.cuda_name)
    lines = [line.replace(" ", "").split("|")[1:-1] for line in text.splitlines()]
    assert lines[2][2:] == ["1.042", f"{8192 * 480e12 / flops:.0f}", "480", "48.5%", "60.0", "-", "-", "-"]
    assert {*lines[-1][1:]} == {"-"}


def test_ratios_are_within_a_round_and_failures_are_shown(measured: dict[str, dict]) -> None:
    names = offload.CONTENDERS
    rounds = {name: [dict(measured.get(name, {}), seconds=1.0), {"seconds": 2.0}] for name in names}
    rounds["ours: 0.25"] = [{"seconds": 1.02}, {"seconds": 2.04}]
    rounds["upstream: 0.25"] = [None, None]
    rounds["ours: fp8 1"] = [{"seconds": 1.2}, {"seconds": 2.4}]
    short, long = (offload.aims_of(Steps(length, 12, rounds), "") for length in (4096, 8192))
    assert [aim.is_met for aim in short] == [True] * 5 + [False]
    assert [aim.is_met for aim in long] == [False, True, True, True, False, False]
    assert math.isnan(short[-1].measured) and short[0].measured == pytest.approx(1.02)
    shown = {name: rounds[name] for name in _gpu_tables._PARTS["offload"] if name in rounds}
    assert [aim.aim for aim in offload.aims_of(Steps(16384, 12, shown), "")] == [1.03, 1.15, 1.15, 1.15]


def test_sections_name_machine_versions_and_parts_that_did_not_end(tmp_path: Path) -> None:
    head = _gpu_tables.heading(H100, "23 Nov 2026")
    assert "23 Nov 2026" in head and "NVIDIA H100 80GB HBM3 (80 GiB)" in head and "torch 2." in head
    assert _gpu_tables.part_section("attention", 0, "| a |\nended: b") == "\n### attention\n\n| a |\n"
    assert _gpu_tables.part_section("offload", 124, "ended: b") == (
        "\n### offload (did not end in time)\n\nended: b\n"
    )
    code, said = _gpu_tables.run_part("nothing", tmp_path, 120)
    assert code == 2 and "invalid choice: 'nothing'" in said and "sharded_weights" in said
    assert _gpu_tables.run_part("gpu_step", tmp_path, 0.1)[0] == 124
