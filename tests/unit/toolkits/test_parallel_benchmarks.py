"""The ranks of `parallel` and `long_context` do what their figures say; figures of known rounds."""

from typing import Any

import pytest
import torch
from distributed_runner import new_job, rejoin, run_distributed

from toolkits.benchmarks import _activation_step as activations
from toolkits.benchmarks import _context_step as context
from toolkits.benchmarks._parallel_figures import (
    Bubble,
    ContextFigures,
    activation_table,
    bubble_table,
    context_table,
)

WAIT_S = 0.03


def run_parts(rank: int, world_size: int) -> dict[str, Any]:
    """Two ranks of each part."""
    from training_runs import CPU

    from patch import compat
    from patch.distributed.groups import initialize, shutdown
    from toolkits.benchmarks import _long_context_rank as long
    from toolkits.benchmarks import _pipeline_bubble as pipeline

    compat.apply(cuda=False)
    config = pipeline.pipeline_run(world_size, 2, 4)
    run = pipeline.build_waiting_run(config, initialize(config, CPU), WAIT_S)
    found: dict[str, Any] = {"pipeline": pipeline.time_step(run)}
    new_job()
    context._TOKENS = 64
    contenders = context.build_contenders(initialize(context.context_run("p2p"), CPU))
    found["losses"] = {name: contender.step() for name, contender in contenders.items()}
    found["bytes"] = contenders[context.COMMUNICATION].num_bytes
    new_job()
    configs = [long.ring_run(tokens, world_size) for tokens in (256, 512)]
    groups = initialize(configs[0], CPU)
    found["peaks"] = [long.step_peak_bytes(one, groups) for one in configs]
    torch.distributed.barrier()  # before anybody leaves the job
    shutdown()
    if rank == 0:
        activations._LENGTH = 64
        found["activations"] = activations.measure([0.5, 1.0], rounds=2)
    rejoin()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_distributed(run_parts, 2)


def test_layers_of_the_pipeline_wait_and_upstream_counts_it(found: list) -> None:
    for rank in found:
        step, compute = rank["pipeline"]
        assert step > compute >= 4 * WAIT_S


def test_contenders_of_context_parallelism_compute_one_loss_and_count_their_messages(found: list) -> None:
    losses = [rank["losses"] for rank in found]
    whole = losses[0][context.WHOLE]
    for name in (context.RING, context.WAITING_RING, context.ALL_TO_ALL):
        assert sum(one[name] for one in losses) == pytest.approx(whole, rel=1e-6)
    model = context.context_run("p2p").model
    piece = 2 * model.num_query_groups * model.kv_channels * 32 * 4
    # In each layer a piece travels in forward, and in backward with its gradient.
    assert [rank["bytes"] for rank in found] == [model.num_layers * 3 * piece] * 2


def test_memory_is_that_of_the_tokens(found: list) -> None:
    short, long = found[0]["peaks"]
    assert found[1]["peaks"] == [short, long]
    assert long == pytest.approx(2 * short, rel=0.1)


def test_activations_are_where_the_contenders_names_say(
    found: list,
) -> None:
    rounds = found[0]["activations"]
    names = [activations.KEEP, activations.RECOMPUTE, activations.offload(0.5), activations.offload(1.0)]
    assert sorted(rounds) == sorted(names)
    keep, recompute, fast, slow = (rounds[name][0] for name in names)
    assert recompute["peak_bytes"] < fast["peak_bytes"] == slow["peak_bytes"] < keep["peak_bytes"] / 2
    assert fast["sent_bytes"] == slow["sent_bytes"] > keep["peak_bytes"] / 2
    assert len(activation_table(rounds).splitlines()) == 5


def test_the_bubble_of_two_waits_has_no_constant() -> None:
    latency, bubble = 0.05, 0.25
    steps = {wait_s: [(wait_s * (1 + bubble) + latency, wait_s)] * 3 for wait_s in (1.0, 3.0)}
    one = Bubble(2, 1, 4, steps)
    assert one.formula == bubble and one.without_constant == pytest.approx(bubble)
    assert one.at(1.0) == pytest.approx(0.3)
    assert bubble_table([one]).splitlines()[1].split()[:4] == ["2", "1", "4", "0.2500"]


def test_ratios_of_context_parallelism_are_within_a_round() -> None:
    first = dict.fromkeys(
        (context.WHOLE, context.RING, context.WAITING_RING, context.ALL_TO_ALL, context.COMPUTE), 2.0
    )
    rounds = [first | {context.COMMUNICATION: 1.0, context.RING: 2.2}]
    rounds += [{name: 2 * seconds for name, seconds in rounds[0].items()}] * 2
    one = ContextFigures(1.0, 100.0, 10**6, rounds)
    assert one.over_bound(context.RING) == one.over_whole(context.RING) == pytest.approx(1.1)
    assert "ring, no overlap" in context_table([one])
