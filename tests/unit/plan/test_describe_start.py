"""The two lines at the start of a log: their parts add up, and the total is that of the plan."""

import re

import pytest
from planned_runs import planned_run

from patch.plan.describe import start_lines
from patch.plan.fits import heaviest_rank


def sizes(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"([\d.]+) GiB", text)]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"tp": 2, "dp": 4}, ["optimizer states", "processes 8 = TP 2 x PP 1 x CP 1 x DP 4 on 1 machine"]),
        ({"pp": 2, "dp": 8, "sharding": "--use-distributed-optimizer --overlapped-distributed-optimizer"},
         ["replicas share optimizer states and gradients", "gradients under way", "on 2 machines"]),
        ({"sharding": "", "dp": 2}, ["replicas share nothing", "8 micro-batches of 1 sample a replica"]),
        ({"flags": "--optimizer-offload-policy static --cpu-offloading"}, ["GiB more in host memory"]),
        ({"flags": "--optimizer-offload-policy auto"}, ["GiB of optimizer states beside it as far as"]),
    ],
)  # fmt: skip
def test_parts_of_the_heaviest_rank_add_up(kind, words):
    run = planned_run(**kind)
    layout, memory = start_lines(run, cuda=True)
    total, *parts = sizes(memory.split(";")[0])
    assert total == pytest.approx(heaviest_rank(run, cuda=True).total / 2**30, abs=0.01)
    assert sum(parts) == pytest.approx(total, abs=0.02 * len(parts))
    for word in words:
        assert word in layout + memory, word


def test_of_precision_align_only_the_state_is_planned():
    _, memory = start_lines(planned_run(size="1B", flags="--precision-align sdpa"), cuda=True)
    total, *parts = sizes(memory)
    assert sum(parts) == pytest.approx(total, abs=0.03) and "activations are not planned" in memory
