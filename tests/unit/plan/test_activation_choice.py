"""What AC=auto chooses: against all mixes, one by one, and what a chosen mix needs when it trains."""

from typing import Any

import pytest
from small_runs import small_run

from patch.checks.rules import is_legal
from patch.config import RunConfig
from patch.device import MachineFacts
from patch.plan.fits import heaviest_rank
from patch.plan.resolve import resolve_activations
from patch.plan.savings import RecomputePlan, with_changes
from patch.preflight.parse import parse_args

CPU = MachineFacts(0, 2)
B200, A100 = "NVIDIA B200", "NVIDIA A100-SXM4-80GB"
RUNS: dict[str, dict[str, Any]] = {
    "one process": {"num_layers": 6},
    "pipeline": {"pp": 2, "num_layers": 12},
    "interleaved": {"pp": 2, "stage": 3, "num_layers": 12, "precision": "bf16"},
    "uneven": {"pp": 3, "num_layers": 7, "account_for_loss_in_pipeline_split": True},
}


def asking(budget: int, changes: dict[str, Any]) -> RunConfig:
    return small_run(recompute_granularity="auto", simulated_device_memory=budget, **changes)


def mixes(num_layers: int) -> list[tuple[float, RecomputePlan]]:
    """All mixes of a stage of so many layers, without offload, and how much of a forward each repeats."""
    whole = [(0.0, RecomputePlan()), (0.05 * num_layers, RecomputePlan("selective"))]
    some = [(float(layers), RecomputePlan("full", "block", layers)) for layers in range(1, num_layers)]
    return (
        whole
        + some
        + [(float(num_layers), RecomputePlan("full", "uniform", k)) for k in range(1, num_layers + 1)]
    )


@pytest.mark.parametrize("name", RUNS)
def test_auto_is_the_cheapest_of_all_mixes_that_fit(name: str) -> None:
    """On a device of unknown speed, for every budget between all and nothing."""
    config = small_run(**RUNS[name])
    runs = [(cost, with_changes(config, (mix.change,))) for cost, mix in mixes(max(config.stage_layers))]
    legal = [(cost, heaviest_rank(run, cuda=False).total) for cost, run in runs if is_legal(run, CPU)]
    for budget in sorted({needed + extra for _, needed in legal for extra in (-1, 0)}):
        chosen, _ = resolve_activations(asking(budget, RUNS[name]), CPU)
        needed = heaviest_rank(chosen, cuda=False).total
        fitting = [cost for cost, other in legal if other <= budget]
        if fitting and not chosen.training.cpu_offloading:
            assert needed <= budget
            assert (min(fitting), needed) in legal
        elif not fitting:
            assert needed <= min(other for _, other in legal)
        assert is_legal(chosen, CPU) and resolve_activations(chosen, CPU) == (chosen, [])


def of_8b(name: str, memory: int, *flags: str, host: int = 2**40) -> tuple[RunConfig, list[str]]:
    machine = MachineFacts(8, 2, memory, host, cuda_name=name)
    argv = (
        "--model-size 8B --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --train-iters 10 "
        "--lr 1 --train-data-path a --output-path b --recompute-granularity auto "
        "--pipeline-model-parallel-size 4 --nproc-per-node 8"
    )
    return resolve_activations(parse_args([*argv.split(), *flags], {}, machine).config, machine)


def test_a_gpu_keeps_some_memory_for_what_is_not_planned() -> None:
    chosen, lines = of_8b(B200, 60 * 2**30)
    assert chosen.recompute == "full"
    assert "54.70 GiB of the 60.00 GiB of a device may be used, a layer's forward takes" in lines[0]
    assert of_8b(B200, 65 * 2**30)[0].recompute == "selective"
    smallest, lines = of_8b(B200, 10 * 2**30)
    assert smallest.recompute == "full" or smallest.training.cpu_offloading
    assert any(line.endswith("chosen, although too much") for line in lines)


def test_states_that_auto_places_make_room_for_activations() -> None:
    auto = ("--optimizer-offload-policy=auto",)
    assert of_8b(B200, 50 * 2**30)[0].recompute == "full"
    assert of_8b(B200, 50 * 2**30, *auto)[0].recompute == "selective"
    threshold = "--optimizer-offload-auto-threshold=30e9"
    assert of_8b(B200, 50 * 2**30, *auto, threshold)[0].recompute == "full"


def test_offload_goes_before_recomputation_where_the_link_is_fast_enough() -> None:
    """A B200 repeats a layer faster than PCIe 5.0 carries its activations; an A100 does not."""
    fast, _ = of_8b(B200, 56 * 2**30)
    assert (fast.recompute, fast.training.cpu_offloading) == ("full", False)
    slow, _ = of_8b(A100, 56 * 2**30)
    assert slow.training.cpu_offloading and slow.recompute != "full"
    unknown, _ = of_8b("a new one", 56 * 2**30)
    assert (unknown.recompute, unknown.training.cpu_offloading) == ("full", False)
    no_room, lines = of_8b(A100, 56 * 2**30, host=2**30)
    assert not no_room.training.cpu_offloading
    assert [line for line in lines if "which host memory has no room for" in line]
