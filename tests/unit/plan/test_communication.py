"""Groups of ranks against a list of all ranks; answers.txt has the seconds of messages."""

import itertools

import pytest
from planned_runs import planned_run as run

from patch.layout import rank_stride
from patch.plan.timing.communication import group_of

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
        assert rank_stride(config.axes, axes[0]) == group[1] - group[0]
