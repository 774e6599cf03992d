"""A step's time by hand, beside published passes and against measured steps; answers.txt has its terms."""

import dataclasses

import planned_runs
import pytest
from planned_runs import planned_run as run

from patch.device import GPU_LIBRARIES
from patch.plan import report as plan_report
from patch.plan import resolve
from patch.plan.flops import flops_per_step
from patch.plan.timing.layer_time import layer_times
from patch.plan.timing.machine import PRESETS
from patch.plan.timing.step_time import StepCosts, step_time

QUIET = dataclasses.replace(planned_runs.H100.reached, contention=0.0)
H100 = dataclasses.replace(planned_runs.H100, reached=QUIET)
"""Messages beside computation do not slow it."""


def parts(config, machine=H100) -> dict[str, float]:
    return {part.name: part.seconds for part in step_time(config, machine).parts}


def test_gradients_hide_behind_the_last_backward_but_for_the_embeddings():
    """On a node all but the last gradient hides; on a slow network what backward does not cover is left."""
    config = run(dp=8)
    embedding = 128256 * 4096
    costs = StepCosts(config, H100)
    assert parts(config)["gradients, exposed"] == pytest.approx(costs.data_parallel.reduce.seconds(embedding))
    assert parts(config)["weights, exposed"] == pytest.approx(costs.data_parallel.gather.seconds(embedding))
    slow = dataclasses.replace(H100, node_link_bandwidth=5e9)
    costs = StepCosts(config, slow)
    messages = costs.data_parallel.reduce.seconds(costs.parameters[0].total)
    left = parts(config, slow)["gradients, exposed"]
    assert left == pytest.approx(messages - costs.backward[0], rel=1e-3)


def test_the_heaviest_stage_may_have_nothing_to_train():
    assert "gradients, exposed" in parts(run(dp=4, pp=2, flags=r"--train-only layers\.3\."))


def test_sharded_gradients_travel_in_each_micro_batch():
    slow = dataclasses.replace(H100, node_link_bandwidth=5e9)
    once, each = (
        parts(run(dp=8, flags=f"--data-parallel-sharding {level}"), slow)["gradients, exposed"]
        for level in ("optimizer", "gradients")
    )
    costs = StepCosts(run(dp=8), slow)
    messages = costs.data_parallel.reduce.seconds(costs.parameters[0].total)
    more = messages - costs.forward[0] - costs.backward[0]
    assert more > 0 and each - once == pytest.approx(7 * more, rel=1e-3)


@pytest.mark.parametrize(
    ("tp", "flags", "machine", "chosen"),
    [
        (2, "", H100, True),
        (8, "", H100, False),  # the host starts 84 pieces more
        (8, "", dataclasses.replace(H100, launch_seconds=1e-6), True),
        (2, "--seq-length 1024", H100, False),  # products of 512 rows
        (2, "--precision fp8", H100, None),  # not of our own products
        (2, "--no-tp-comm-overlap", H100, None),
        (1, "", H100, None),
    ],
)
def test_tp_sends_in_pieces_where_a_layer_takes_less_time(tp, flags, machine, chosen, monkeypatch):
    config = run(tp=tp, length=8192, flags=f"--sequence-parallel {flags}")
    monkeypatch.setattr(resolve, "machines_of", lambda config, facts: machine)
    resolved, lines = resolve.resolve_tp_comm_overlap(config, machine.facts)
    assert len(lines) == (chosen is not None)
    assert resolved.parallel.tp_comm_overlap == (
        config.parallel.tp_comm_overlap if chosen is None else chosen
    )
    assert layer_times(config, machine) == layer_times(resolved, machine)
    facts = dataclasses.replace(machine.facts, libraries=frozenset(GPU_LIBRARIES))
    layers = resolve.resolve_run(config, facts)[0].model.transformer_impl
    assert layers == ("local" if chosen else "transformer_engine")


@pytest.mark.parametrize(
    ("name", "length", "flags", "least", "most"),
    [
        ("a100", 4096, "", 0.62, 0.70),  # 212 TFLOP/s are the best of Pai's article
        ("h100", 8192, "", 0.50, 0.61),  # Megatron-Bridge: 45 to 50 % of whole steps
        ("h100", 8192, "--precision fp8", 0.36, 0.41),  # 744 TFLOP/s
    ],
)
def test_a_pass_of_8b_reaches_what_is_published(name, length, flags, least, most):
    """Forward and backward alone: the rest of a step hides on one node with many micro-batches."""
    config, machine = run(dp=8, length=length, flags=flags), PRESETS[name]
    costs = StepCosts(config, machine)
    flops = flops_per_step(config).model / config.training.global_batch_size
    seconds = sum(costs.forward) + sum(costs.backward)
    assert least < flops / seconds / machine.peak_flops(config.training.precision) < most


@pytest.mark.parametrize(
    ("layers", "precision", "seconds", "within"),
    [
        (9, "bf16", 0.265, 0.05), (9, "fp8", 0.220, 0.05),
        (2, "bf16", 0.110, 0.10), (11, "bf16", 0.326, 0.10), (11, "fp8", 0.272, 0.10),  # before faster heads
    ],
)  # fmt: skip
def test_steps_that_an_h100_has_run(layers, precision, seconds, within):
    """8B's layers, one sequence of 8192 tokens a step: toolkits/benchmarks/RESULTS.md, gpu_step."""
    flags = f"--num-layers {layers} --precision {precision} --global-batch-size 1 --nproc-per-node 1"
    machine = dataclasses.replace(planned_runs.H100, devices_per_node=1)
    config = run(length=8192, flags=flags, machine=machine, sharding="")
    assert step_time(config, machine).seconds == pytest.approx(seconds, rel=within)


def test_several_nodes_wait_for_the_slowest():
    two, one = (dataclasses.replace(H100, nodes=nodes) for nodes in (2, 1))
    assert two.sustained == H100.reached.sustained and one.sustained == 1
    assert layer_times(run(), two).forward.total > layer_times(run(), one).forward.total


def test_streamed_states_leave_the_host_less_to_do():
    """Few cores; copies both ways take 10 bytes of each state, and hide behind the forward."""
    host = dataclasses.replace(H100, devices_per_node=1, host_bandwidth=12 * 15e9)
    seconds = []
    for share in (0, 0.5, 1):
        flags = f"--optimizer-offload-policy static --optimizer-offload-streamed {share}"
        flags += " --global-batch-size 1 --nproc-per-node 1"
        config = run(length=8192, flags=flags, machine=host, sharding="")
        seconds.append(parts(config, host)["states on the host, exposed"])
    costs = StepCosts(config, host)
    copies = 10 * costs.states / (host.host_link_bandwidth * host.reached.host_link)
    assert seconds[1] < seconds[2] < seconds[0]
    assert seconds[2] == pytest.approx(copies - costs.forward[0], rel=1e-3)
    rows = (plan_report._time(step_time(config, each), config, each) for each in (host, H100))
    warned = [" slows the step" in str(row) for row in rows]
    assert warned == [False, True]


def test_muon_and_kto_have_parts_of_their_own():
    """A layer of 8B has 4 x 4096 x (n, m) matrices; FLOPs of them are counted in test_flops.py."""
    config = run(dp=8, flags="--optimizer muon --data-parallel-sharding optimizer")
    found, rate = parts(config), H100.bf16_flops * H100.reached.gemm
    shapes = 2 * [(4096, 4096)] + 2 * [(1024, 4096)] + 3 * [(4096, 14336)]
    flops = 32 * 5 * sum(4 * n * n * m + 2 * n**3 for n, m in shapes) / 8
    assert found["Newton-Schulz of Muon"] == pytest.approx(flops / rate)
    elements = 32 * sum(n * m for n, m in shapes)
    gather = elements * 4 * 2 * 7 / 8 / (H100.node_link_bandwidth * H100.reached.node_link)
    assert found["whole matrices for Muon"] == pytest.approx(gather, rel=0.05)
    config = run(pp=2, flags="--objective kto --sft --dataset-type raw")
    costs = StepCosts(config, H100)
    longest = max(costs.forward[0], costs.forward[1] - costs.loss * 2 / 3)
    passes = config.num_micro_batches + 1
    assert parts(config)["KTO's reference point"] == pytest.approx(passes * longest)
