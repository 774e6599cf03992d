"""Simulated runs: against the closed form, against published figures, and stragglers against random draws."""

import random
from statistics import fmean

import pytest
from planned_runs import H100, planned_run

from patch.plan.simulation.run import simulated_run
from patch.plan.simulation.scaling import VARIANTS, scaled_run, scaling
from patch.plan.simulation.simulate import simulate_step, step_seconds
from patch.plan.simulation.stragglers import Spread, slowdown, slowest_of
from patch.plan.timing.step_time import step_time
from toolkits import _scaling, plan


@pytest.mark.parametrize("count", [2, 8, 64, 1000])
def test_the_slowest_of_many_against_draws(count: int) -> None:
    draw = random.Random(count)
    slowest = fmean(max(draw.gauss(0, 1) for _ in range(count)) for _ in range(40_000 // count))
    assert slowest_of(count) == pytest.approx(slowest, rel=0.05)
    assert slowest_of(1) == 0


def test_stragglers_against_draws() -> None:
    """64 ranks wait for each other after 8 passes of 1 s times the device's and the pass's own factor."""
    draw, spread, steps = random.Random(0), Spread(of_devices=0.03, of_passes=0.05), []
    for _ in range(150):
        ranks = [
            8 * (1 + draw.gauss(0, 0.03)) + sum(draw.gauss(0, 0.05) for _ in range(8)) for _ in range(64)
        ]
        steps.append(max(ranks))
    assert 8 * slowdown(spread, 64, 8) == pytest.approx(fmean(steps), rel=0.01)
    assert slowdown(Spread(0, 0), 64, 8) == slowdown(spread, 1, 8) == 1


@pytest.mark.parametrize(
    ("layout", "bound"),
    [
        ({"dp": 8}, 0.01),
        ({"dp": 64, "flags": "--global-batch-size 64"}, 0.05),
        ({"tp": 8, "pp": 4, "dp": 4, "size": "70B", "length": 8192}, 0.03),
        ({"cp": 4, "dp": 2, "length": 16384, "flags": "--global-batch-size 4"}, 0.03),
        (
            {
                "dp": 8,
                "flags": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            },
            0.01,
        ),
    ],
    ids=str,
)
def test_the_closed_form_says_about_the_same(layout: dict, bound: float) -> None:
    """Both have the same costs; what hides what is computed in two ways."""
    config = planned_run(**layout)
    found = simulate_step(simulated_run(config, H100))
    assert found.seconds == pytest.approx(step_time(config, H100).seconds, rel=bound)
    assert found.computing < found.seconds


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 4, "flags": "--global-batch-size 28"},
        {"dp": 4, "flags": "--global-batch-size 20 --data-parallel-sharding gradients"},
        {"tp": 4, "pp": 4, "dp": 2, "size": "70B", "flags": "--global-batch-size 32"},
        {
            "tp": 4,
            "pp": 2,
            "size": "8B",
            "flags": "--global-batch-size 8 --num-layers-per-virtual-pipeline-stage 4",
        },
    ],
    ids=str,
)
def test_rounds_of_micro_batches_are_alike(layout: dict) -> None:
    step = simulated_run(planned_run(**layout), H100)
    assert step_seconds(step) == pytest.approx(simulate_step(step).seconds)


def test_offloaded_states_lengthen_a_step() -> None:
    flags = "--global-batch-size 8 --optimizer-offload-policy static --optimizer-offload-fraction"
    seconds = [
        simulate_step(simulated_run(planned_run(dp=8, flags=f"{flags} {share}"), H100)).seconds
        for share in (0.0, 0.3, 1.0)
    ]
    assert seconds == sorted(set(seconds))


@pytest.mark.parametrize(("gpus", "mfu"), [(8192, 0.43), (16384, 0.41)])
def test_llama_3_405b_as_published(gpus: int, mfu: float) -> None:
    """arXiv 2407.21783, table 4: 430 and 400 TFLOP/s a GPU; nothing was fitted to them."""
    (point,) = scaling("405B", H100, [gpus])
    assert point.mfu == pytest.approx(mfu, rel=0.05)


def test_instances_keep_latency_small() -> None:
    """On 4096 GPUs rings of all replicas have a latency that small buckets pay more often than large ones."""
    tapered, uniform, instances = (next(scaling("8B", H100, [4096], variant)) for variant in VARIANTS)
    assert tapered.efficiency < uniform.efficiency < instances.efficiency
    assert scaled_run("8B", H100, 4096, VARIANTS[2]).num_state_shares == 64
    few = [next(scaling("8B", H100, [64], variant)).efficiency for variant in VARIANTS]
    assert few[0] == pytest.approx(few[1], rel=1e-3) and few[0] >= few[1]
    assert not list(scaling("70B", H100, [32]))  # one replica
    assert not list(scaling("405B", H100, [256]))  # does not fit


def test_the_table_and_the_plot(tmp_path, capsys) -> None:
    assert _scaling.run(tmp_path / "scaling.png", H100, [64]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "not measured" in lines[0]
    assert [line[:3] for line in lines if line[6:13].strip() == "64"] == ["8B ", "70B"]  # 405B needs more
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_what_the_command_line_refuses(tmp_path, capsys) -> None:
    scaling_of = ["--scaling", str(tmp_path / "a.png")]
    assert plan.main([*scaling_of, "--machine", "here"]) == 2
    assert "expected a machine with GPUs" in capsys.readouterr().err
    assert plan.main([*scaling_of, "--", "--model-size", "8B"]) == 2
    assert "takes --machine alone" in capsys.readouterr().err
