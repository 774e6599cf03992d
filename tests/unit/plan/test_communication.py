"""Groups of ranks against a list of all ranks, and messages by hand."""

import itertools

import pytest
from planned_runs import H100
from planned_runs import planned_run as run

from patch.plan.activations import boundary_bytes
from patch.plan.timing.communication import apart, gradient_travel, group_of, ring

SHAPES = [
    ("tp-cp-dp-pp", 2, 1, 4, 4),
    ("tp-cp-dp-pp", 8, 2, 4, 1),
    ("tp-cp-dp-pp", 1, 4, 8, 2),
    ("tp-cp-pp-dp", 2, 2, 4, 4),
    ("pp-dp-cp-tp", 4, 2, 2, 2),
]


@pytest.mark.parametrize("axes", [("tp",), ("cp",), ("dp",), ("pp",), ("dp", "cp")])
@pytest.mark.parametrize(("order", "tp", "cp", "dp", "pp"), SHAPES)
def test_groups_lie_on_nodes_as_a_list_of_all_ranks_says(order, tp, cp, dp, pp, axes):
    config = run(order, tp=tp, cp=cp, dp=dp, pp=pp)
    names, sizes = order.split("-"), {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
    places = itertools.product(*(range(sizes[name]) for name in reversed(names)))
    group = [
        rank
        for rank, place in enumerate(places)
        if all(index == 0 for name, index in zip(reversed(names), place, strict=True) if name not in axes)
    ]
    assert len(group) == group_of(config, *axes).size
    nodes = [rank // config.parallel.nproc_per_node for rank in group]
    assert max(nodes.count(node) for node in nodes) == group_of(config, *axes).per_node
    assert len(set(nodes)) == group_of(config, *axes).nodes
    if len(axes) == 1 and len(group) > 1:
        assert apart(config, axes[0]) == group[1] - group[0]


def test_a_ring_on_a_node_sends_all_but_a_share_over_its_links():
    numel, rate = 1e9, 450e9 * H100.reached.node_link
    found = ring(H100, group_of(run(dp=8), "dp"), 2).seconds(numel)
    assert found == pytest.approx(2 * numel * 7 / 8 / rate + 7 * 3.6e-6)
    assert ring(H100, group_of(run(dp=1), "dp"), 2).seconds(numel) == 0


@pytest.mark.parametrize(("tp", "links"), [(1, 8), (2, 4), (8, 1)])
def test_a_ring_over_nodes_uses_the_network_of_all_its_ranks(tp, links):
    """32 GPUs; with TP=8 a group has one rank a node, and a tree of 2 steps."""
    numel, size = 1e9, 32 // tp
    rate = min(450e9 * H100.reached.node_link, links * 50e9 * H100.reached.network)
    latency = 2 * 14e-6 if tp == 8 else 4 * 14e-6 + (size - 5) * 3.6e-6
    found = ring(H100, group_of(run(tp=tp, dp=size), "dp"), 4).seconds(numel)
    assert found == pytest.approx(4 * numel * (size - 1) / size / rate + latency)


def test_without_sharding_gradients_travel_twice_and_weights_never():
    none, once = (
        gradient_travel(run(dp=8, flags=f"--data-parallel-sharding {level}"), H100)
        for level in ("none", "optimizer")
    )
    assert none.reduce.seconds(10**9) == pytest.approx(2 * once.reduce.seconds(10**9))
    assert none.gather.seconds(10**9) == 0 and once.gather.seconds(10**9) > 0
    half = gradient_travel(run(dp=8, flags="--grad-reduce-in-bf16"), H100)
    assert half.reduce.bytes_per_element == 2 and once.reduce.bytes_per_element == 4


def test_instances_share_inside_a_node_and_sum_across():
    """Two instances of eight GPUs each: the parts of a node's rank are summed with one other node's."""
    flags = "--num-distributed-optimizer-instances 2"
    travel = gradient_travel(run(dp=16, flags=flags), H100)
    assert travel.gather == gradient_travel(run(dp=8), H100).gather
    rate = 50e9 * H100.reached.network
    of_shard = 2 * (1 / 2) * 4 * (1e9 / 8) / rate
    assert travel.across.seconds(1e9) == pytest.approx(of_shard + 2 * 14e-6)


def test_sequence_parallelism_cuts_what_stages_send():
    whole, cut = run(tp=4), run(tp=4, flags="--sequence-parallel")
    assert boundary_bytes(whole) == 4096 * 4096 * 2 == 4 * boundary_bytes(cut)
    assert boundary_bytes(run(cp=2)) == boundary_bytes(whole) // 2
