"""`offload` without a GPU says so; its contenders train a small model on the CPU, to one loss."""

import math
from pathlib import Path

import pytest
from distributed_runner import new_job, run_distributed
from small_runs import small_run

from toolkits.benchmarks import offload
from toolkits.benchmarks._offload_run import CONTENDERS, measure, offload_run, with_offload


def run_contenders(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    from patch import compat
    from toolkits.benchmarks._upstream import prepare_cpu

    compat.apply(cuda=False)
    prepare_cpu()
    config = small_run(
        precision="bf16", num_layers=1, sft=False, global_batch_size=2, reduce_bucket_size=10**6,
        lr=1e-3, min_lr=1e-3, lr_warmup_iters=0,
        simulated_device_memory=10**9, optimizer_offload_auto_threshold=10**6,
    )  # fmt: skip
    found = {}
    for name in CONTENDERS:
        if name.startswith("ours") or "no offload" in name:  # upstream's offload needs CUDA
            found[name] = measure(config, name, steps=2)
            new_job()
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    return run_distributed(run_contenders, 1)[0]


def test_contenders_train_the_same_and_place_states_where_their_names_say(found: dict) -> None:
    ours = {name.split(": ")[1]: one for name, one in found.items() if name.startswith("ours")}
    assert len({one["loss"] for one in ours.values()}) == 1
    assert {name: round(one["fraction"], 1) for name, one in ours.items()} == {
        "no offload": 0.0, "0.25": pytest.approx(0.25, abs=0.05), "0.5": 0.5, "1": 1.0, "auto": 0.0,
    }  # fmt: skip
    assert found["upstream: no offload"]["loss"] == pytest.approx(ours["no offload"]["loss"], abs=0.02)
    assert all(one["seconds"] > 0 and one["host_gib"] > 0.1 for one in found.values())


def test_ratios_are_within_a_round_and_failures_are_shown(found: dict) -> None:
    rounds = {name: [dict(found.get(name, {}), seconds=1.0), {"seconds": 2.0}] for name in CONTENDERS}
    rounds["ours: 0.25"] = [{"seconds": 1.02}, {"seconds": 2.04}]
    rounds["upstream: 0.25"] = []
    aims = offload.aims_of({"4096": rounds, "8192": rounds})
    assert [aim.is_met for aim in aims] == [True, False, True, True, False, False, True, True]
    assert math.isnan(aims[1].measured) and aims[0].measured == pytest.approx(1.02)
    lines = offload.table("4096", rounds).splitlines()
    (line,) = (line for line in lines if line.startswith("upstream: 0.25"))
    assert line.split()[2:] == ["-", "nan", "-", "-", "-"]


def test_shapes_are_those_of_8b() -> None:
    from patch.plan import total_parameters

    whole = 32 * offload._LAYER + offload._EMBEDDINGS
    assert total_parameters(offload_run(32, 4096).model) == whole == 8_030_261_248
    assert 10 < offload.default_layers(150 * 10**9) < 20
    static = with_offload(offload_run(2, 4096), "ours: 0.5").optimizer
    assert (static.optimizer_offload_policy, static.optimizer_offload_fraction) == ("static", 0.5)


def test_without_a_gpu_it_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert offload.main(["--json", str(tmp_path / "report.json")]) == 0
    said = capsys.readouterr().out
    assert said.startswith("PLAN, not measured") and said.endswith("not run: needs a GPU, found none\n")
