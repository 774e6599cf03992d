"""What benchmarks measure is what their figures say; those of a GPU say that there is none."""

import json
import re
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runner import run_distributed
from small_runs import small_run
from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

from patch.config import RunConfig
from patch.device import MachineFacts
from toolkits.benchmarks import attention, checkpoint, gpu_step, offload, overlap
from toolkits.benchmarks.__main__ import main
from toolkits.benchmarks._report import COMMUNICATION, COMPUTE, Rounds
from toolkits.benchmarks.adam_cpu import Tensors, contenders
from toolkits.benchmarks.attention import Heads
from toolkits.benchmarks.gpu_step import Recipe, Steps

H100 = MachineFacts(
    cuda_devices=1, cpu_cores=16, cuda_memory_bytes=81559 << 20, compute_capability=(9, 0),
    cuda_name="NVIDIA H100 80GB HBM3", libraries=frozenset({"transformer_engine"}),
)  # fmt: skip
WAIT_S = 0.03


def test_a_benchmark_reports_aims_machine_and_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_COUNT": 2, "_ROWS": 16, "_STEP_S": 0.1}.items():  # else it writes 13 GB
        monkeypatch.setattr(checkpoint, name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["checkpoint", "--quick", "--json", str(tmp_path / "report.json")]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert [sorted(aim) for aim in report["aims"]] == [["aim", "measured", "met", "name"]] * 3
    assert report["versions"]["torch"] and report["machine"]["cores"]
    assert {len(seconds) for seconds in report["rounds"].values()} == {3}
    said = capsys.readouterr().out
    assert sum(line.startswith(("met   ", "MISSED")) for line in said.splitlines()) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["gpu_step"]) == 0 and capsys.readouterr().out == "not run: needs a GPU, found none\n"


def run_waiting(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Two steps of each contender of `overlap`, whose layers wait."""
    from training_runs import CPU

    from patch import compat
    from patch.distributed.groups import initialize
    from toolkits.benchmarks._contenders import OurTrainer, prepare_cpu

    compat.apply(cuda=False)
    prepare_cpu()
    overlap.WAIT_S = WAIT_S
    overlap._SHAPE |= {"num_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    config = overlap.sharded_run(world_size, 2)
    by_name = overlap.build_contenders(config, initialize(config, CPU), CPU.device)
    found = {}
    for name, one in by_name.items():
        one.step()
        begin = time.perf_counter()
        loss = one.step()
        one.settle()
        seconds = time.perf_counter() - begin
        if isinstance(one, OurTrainer):
            (model,), whole = one.run.stages, one.run.optimizer.full_weights()
        else:
            model, whole = one.model, nullcontext()
        with whole:
            weights = [weight.detach().float().clone().numpy() for weight in model.parameters()]
        found[name] = {"seconds": seconds, "loss": loss, "weights": weights}
    overlap.communicate(by_name["ours: optimizer"].run.optimizer)
    return found


def test_contenders_of_overlap_wait_and_come_to_the_same_weights() -> None:
    found = run_distributed(run_waiting, 2)
    ours = found[0]["ours: none"]
    for rank in found:
        for name, one in rank.items():
            assert one["seconds"] >= 1.9 * WAIT_S  # two micro-batches
            is_same = all(map(np.array_equal, one["weights"], ours["weights"]))
            if name == COMPUTE:  # with the gradients of one rank, and its own weights alone
                assert not is_same
                continue
            assert one["loss"] == pytest.approx(ours["loss"], rel=1e-3)
            # Upstream averages where we sum, so its gradients differ in their last bits.
            assert is_same or not name.startswith("ours")
            for own, other in zip(one["weights"], ours["weights"], strict=True):
                np.testing.assert_allclose(own, other, rtol=0.02, atol=1e-3)


def test_ratios_are_within_a_round_and_the_best_possible_one_is_the_bound_over_upstream() -> None:
    seconds = {
        COMPUTE: 1.0, COMMUNICATION: 0.5, "ours: none": 1.05, "ours: optimizer": 1.02,
        overlap.ALL_TO_ALL: 1.25, "upstream: gradients": 2.0,
    }  # fmt: skip
    figures = Rounds({name: [one, 2 * one] for name, one in seconds.items()})
    row = next(line for line in figures.table("", "ours: none").splitlines() if "all-to-all" in line)
    assert row.replace(" ", "").split("|")[2:6] == ["1.875", "1.562-2.188", "1.190", "1.250"]
    aims = overlap.aims_of(2, {"1": figures, "16": figures})
    found = [(round(aim.measured, 3), aim.aim) for aim in aims]
    assert found == [(0.816, 0.90), (1.02, 1.05), (0.816, 0.97)]
    assert "(perfect overlap: 0.800)" in aims[0].name


def test_contenders_of_adam_do_the_same_update() -> None:
    after = {}
    for title in contenders(Tensors(64))[0]:
        tensors = Tensors(5056)
        before, case = tensors.weight.clone(), title.split(":")[0]
        contenders(tensors)[0][title].update()
        after[title] = tensors.weight if case == "bf16" else tensors.master
        assert case != "bf16" or not torch.equal(tensors.weight, before), title
        if case != "copy":
            torch.testing.assert_close(after[title], after[f"{case}: ours"], rtol=2**-7, atol=1e-7)


def test_flops_of_attention_are_torchs_and_those_of_a_step_count_no_norms() -> None:
    shape, heads = (4, 4, 4096, 8), Heads(queries=4, groups=2, size=8)
    square = sdpa_flop_count(shape, shape, shape) + sdpa_backward_flop_count(shape, shape, shape, shape)
    assert attention.num_flops(4096, heads) == pytest.approx(square * 4097 / 2 / 4096, rel=1e-12)
    layers = gpu_step.layers_that_fit(H100, 8192, 0.88)
    tokens = 3 * 2 * 8192 * (layers * 218_103_808 + 4096 * 128256)  # weights of products
    flops = tokens + 3 * layers * 4 * 32 * 128 * 8192 * 8193 / 2
    steps = Steps(8192, layers, {"local bf16": [{"seconds": flops / 480e12, "gpu_gib": 60.0}]})
    assert steps.tflops("local bf16") == pytest.approx(480, rel=1e-9)


def run_small(rank: int, world_size: int) -> dict[str, dict]:
    """Steps of the contenders of `offload` in bf16, but others' offload, which needs CUDA; one more fails."""
    from training_runs import CPU

    from patch import compat
    from toolkits.benchmarks._contenders import prepare_cpu

    compat.apply(cuda=False)
    prepare_cpu()
    gpu_step.step_run = lambda recipe, layers, sequence: _small(recipe)
    names = {"upstream: no offload"} | {name for name in offload.CONTENDERS if name.startswith("ours")}
    recipes = {name: offload.CONTENDERS[name] for name in sorted(names) if "fp8" not in name}
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


def test_contenders_of_offload_train_the_same_and_place_states_where_their_names_say() -> None:
    (measured,) = run_distributed(run_small, 1)
    ours = {name.split(": ")[1]: one for name, one in measured.items() if name.startswith("ours")}
    assert len({one["loss"] for one in ours.values()}) == 1
    assert {name: round(one["fraction"], 1) for name, one in ours.items()} == {
        "no offload": 0.0, "0.25": pytest.approx(0.25, abs=0.05), "0.5": 0.5, "1": 1.0, "auto": 0.0,
        "weights": 1.0,
    }  # fmt: skip
    assert measured["upstream: no offload"]["loss"] == pytest.approx(ours["no offload"]["loss"], abs=0.02)
    for one in measured.values():
        assert one["seconds"] > 0 and one["host_gib"] > 0.1
        shares = [float(found) for found in re.findall(r"(?m)^.*?([\d.]+)%", one["kernels"])]
        assert len(shares) == 10 and shares == sorted(shares, reverse=True) and 20 < sum(shares) <= 100
