"""A step's time by hand, beside published passes and against measured steps; answers.txt has its terms."""

import dataclasses

import planned_runs
import pytest
from planned_runs import planned_run as run

from patch.device import GPU_LIBRARIES
from patch.plan import resolve
from patch.plan.flops import flops_per_step
from patch.plan.timing.layer_time import layer_times, product_seconds, with_tensor_overlap
from patch.plan.timing.machine_presets import PRESETS, this_machine
from patch.plan.timing.step_time import offloaded_fraction, step_costs, step_time

QUIET = dataclasses.replace(planned_runs.H100.reached, contention=0.0)
H100 = dataclasses.replace(planned_runs.H100, reached=QUIET)
"""Messages beside computation do not slow it."""


def parts(config, machine=H100) -> dict[str, float]:
    return {part.name: part.seconds for part in step_time(config, machine).parts}


def test_gradients_hide_behind_the_last_backward_but_for_the_embeddings():
    """On a node all but the last gradient hides; on a slow network what backward does not cover is left."""
    config = run(dp=8)
    embedding = 128256 * 4096
    costs = step_costs(config, H100)
    assert parts(config)["gradients, exposed"] == pytest.approx(costs.travel.reduce.seconds(embedding))
    assert parts(config)["weights, exposed"] == pytest.approx(costs.travel.gather.seconds(embedding))
    slow = dataclasses.replace(H100, node_link_bandwidth=5e9)
    costs = step_costs(config, slow)
    travel = costs.travel.reduce.seconds(costs.parameters[0])
    left = parts(config, slow)["gradients, exposed"]
    assert left == pytest.approx(travel - costs.backward[0], rel=1e-3)


def test_sharded_gradients_travel_in_each_micro_batch():
    slow = dataclasses.replace(H100, node_link_bandwidth=5e9)
    once, each = (
        parts(run(dp=8, flags=f"--data-parallel-sharding {level}"), slow)["gradients, exposed"]
        for level in ("optimizer", "gradients")
    )
    costs = step_costs(run(dp=8), slow)
    travel = costs.travel.reduce.seconds(costs.parameters[0])
    more = travel - costs.forward[0] - costs.backward[0]
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


def test_by_hand_a_message_in_pieces_costs_sums_and_smaller_products_and_hides():
    """One rank's 4096 rows of 4096 numbers are added twice in forward, once for each sum over ranks."""
    config = with_tensor_overlap(run(tp=2, length=8192, flags="--sequence-parallel"), True)
    summed = 2 * 3 * 4096 * 4096 * 2 / H100.memory_rate
    shapes = [(8192, 3072, 4096), (8192, 4096, 2048), (8192, 14336, 4096), (8192, 4096, 7168)]
    whole, halves = (
        sum(times * product_seconds(H100, "bf16", (m / times, n, k), 2) for m, n, k in shapes)
        for times in (1, 2)
    )
    assert layer_times(config, H100).forward.tensor == pytest.approx(summed + halves - whole)


def test_auto_offload_takes_what_the_device_has_no_room_for():
    config = run(flags="--optimizer-offload-policy auto")
    assert 0.85 < offloaded_fraction(config, H100) <= 1
    assert offloaded_fraction(run(dp=8, flags="--optimizer-offload-policy auto"), PRESETS["h200"]) == 0
    assert 0 < offloaded_fraction(config, PRESETS["h200"]) < 0.5
    assert offloaded_fraction(run(), H100) == 0


@pytest.mark.parametrize(
    ("name", "length", "flags", "least", "most"),
    [
        ("a100", 4096, "", 0.62, 0.70),  # 212 TFLOP/s are the best of Pai's article
        ("h100", 8192, "", 0.45, 0.52),  # Megatron-Bridge: 45 to 50 %
        ("h100", 8192, "--precision fp8", 0.30, 0.38),  # 744 TFLOP/s
    ],
)
def test_a_pass_of_8b_reaches_what_is_published(name, length, flags, least, most):
    """Forward and backward alone: the rest of a step hides on one node with many micro-batches."""
    config, machine = run(dp=8, length=length, flags=flags), PRESETS[name]
    costs = step_costs(config, machine)
    flops = flops_per_step(config).model / config.training.global_batch_size
    seconds = sum(costs.forward) + sum(costs.backward)
    assert least < flops / seconds / machine.peak_flops(config.training.precision) < most


def test_a_cpu_has_no_mfu():
    machine = this_machine(dataclasses.replace(H100.facts, cuda_devices=0), processes=1)
    time = step_time(run(size="tiny", length=64), machine)
    assert time.mfu is None and time.seconds > 0


def test_passes_wait_for_the_slowest_way_of_their_weights() -> None:
    """8B's matrices and both ends over PCIe 5.0; gradients of 4 bytes go back, which the host adds up."""
    flags = "--optimizer-offload-policy static --cpu-offloading-weights"
    alone = run(dp=1, length=512, flags=flags, sharding="--data-parallel-sharding parameters")
    costs, weights = step_costs(alone, H100), 2 * (8_030_261_248 - 65 * 4096)
    link, memory, backward = 64e9 * 0.8, 614e9 * 0.6, costs.backward[0]
    (waits,) = costs.waits
    assert waits.forward == pytest.approx(weights / link - costs.forward[0]) and waits.gather == 0
    assert waits.backward == pytest.approx(max(2 * weights / link, 9 * weights / memory) - backward)
    exposed = parts(alone)["weights of each pass, exposed"]
    assert exposed == pytest.approx(8 * (waits.forward + waits.backward))


def test_long_passes_hide_gathers_but_the_first() -> None:
    shared = run(dp=8, length=8192, sharding="--data-parallel-sharding parameters")
    (waits,) = step_costs(shared, H100).waits
    seconds, ends = 7 / 8 / (450e9 * 0.78), 2 * 128256 * 4096
    assert waits.gather == pytest.approx(2 * 8_030_261_248 * seconds, rel=0.03)
    assert waits.forward == pytest.approx(ends * seconds, rel=0.03)
    assert "weights of each pass, exposed" in parts(shared) and "weights, exposed" not in parts(shared)


def test_states_on_a_disk_take_as_long_as_it_reads_and_writes_them() -> None:
    flags = "--optimizer-offload-policy static --offload-folder a --optimizer-offload-host-share 0"
    for words, num_bytes in (("", 10), ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", 6)):
        config = run(dp=1, flags=f"{flags} {words}")
        weights, costs = 8_030_261_248, step_costs(config, H100)
        disk, down = 2 * num_bytes * weights / (40e9 * 0.8), 6 * weights / (64e9 * 0.8)
        exposed = disk - costs.backward[0] / 1.36 - costs.forward[0] + down - costs.backward[0]
        assert parts(config)["states on the host, exposed"] == pytest.approx(exposed)
