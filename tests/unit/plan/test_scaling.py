"""--scaling: stragglers against draws, MFU against published training, the table, what is refused."""

import random
from statistics import fmean

import pytest
from planned_runs import H100

from toolkits import plan
from toolkits._scaling import run, scaled_run, scaling, slowdown, slowest_of


@pytest.mark.parametrize("count", [2, 8, 64, 1000])
def test_the_slowest_of_many_against_draws(count: int) -> None:
    draw = random.Random(count)
    slowest = fmean(max(draw.gauss(0, 1) for _ in range(count)) for _ in range(40_000 // count))
    assert slowest_of(count) == pytest.approx(slowest, rel=0.05)
    assert slowest_of(1) == 0


def test_stragglers_against_draws() -> None:
    """64 ranks wait for each other after 8 passes of 1 s times the device's and the pass's own factor."""
    draw, steps = random.Random(0), []
    for _ in range(150):
        ranks = [
            8 * (1 + draw.gauss(0, 0.03)) + sum(draw.gauss(0, 0.05) for _ in range(8)) for _ in range(64)
        ]
        steps.append(max(ranks))
    assert 8 * slowdown(64, 8, 0.03, 0.05) == pytest.approx(fmean(steps), rel=0.01)
    assert slowdown(64, 8, 0, 0) == slowdown(1, 8) == 1


@pytest.mark.parametrize(("gpus", "mfu"), [(8192, 0.43), (16384, 0.41)])
def test_llama_3_405b_as_published(gpus: int, mfu: float) -> None:
    """arXiv 2407.21783, table 4: 430 and 400 TFLOP/s a GPU; nothing was fitted to them."""
    (point,) = scaling("405B", "h100", [gpus])
    assert point.mfu == pytest.approx(mfu, rel=0.05)


def test_instances_keep_latency_small() -> None:
    """On 4096 GPUs rings of all replicas have a latency that every bucket pays again."""
    (one, few), (instances, few_instances) = (
        scaling("8B", "h100", [4096, 64], has_instances=has) for has in (False, True)
    )
    assert one.mfu + 0.015 < instances.mfu and few.mfu == pytest.approx(few_instances.mfu, rel=1e-3)
    planned = scaled_run("8B", "h100", 4096, H100.facts, has_instances=True)
    assert planned.resolved.state_group_size == 64
    assert not scaling("70B", "h100", [32])  # one replica
    assert not scaling("405B", "h100", [256])  # does not fit


def test_the_table_and_what_is_refused(capsys) -> None:
    assert run("h100", [64]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not measured" in lines[0]
    assert [line[:3] for line in lines if line[6:13].strip() == "64"] == ["8B ", "70B"]  # 405B needs more
    refused = {"--machine here": "a machine with GPUs", "-- --model-size 8B": "takes --machine alone"}
    for words, message in refused.items():
        assert plan.main(["--scaling", *words.split()]) == 2 and message in capsys.readouterr().err
