"""Cores of workers on machines of several NUMA nodes, from a copy of what Linux says of a GPU."""

from pathlib import Path

import pytest

from patch.device import MachineFacts, near_cores
from patch.launch.launcher import cores_of_workers

LOWER, UPPER, ALL = {*range(4), *range(8, 12)}, {*range(4, 8), *range(12, 16)}, {*range(16)}


@pytest.mark.parametrize(
    ("gpus", "num_local", "own", "expected"),
    [
        ((LOWER, LOWER, UPPER, UPPER), 4, ALL, [LOWER, LOWER, UPPER, UPPER]),
        ((UPPER, LOWER), 2, ALL, [UPPER, LOWER]),
        # cores that the user kept from the launcher
        ((LOWER, UPPER), 2, {2, 3, 4, 5}, [{2, 3}, {4, 5}]),
        ((LOWER, UPPER), 2, {2, 3}, []),
        # no worker is bound: no GPU; one node; a node that is not known; fewer cores than threads
        ((), 4, ALL, []),
        ((ALL, ALL), 2, ALL, []),
        ((LOWER, set()), 2, ALL, []),
        ((LOWER, UPPER), 1, ALL, []),
        ((LOWER, LOWER), 2, ALL, []),
    ],
)
def test_workers_get_the_cores_of_their_node(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple, num_local: int, own: set, expected: list
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: own)
    facts = MachineFacts(len(gpus), len(own), gpu_cores=tuple(map(frozenset, gpus)))
    assert cores_of_workers(facts, num_local) == expected


def test_cores_near_a_pci_device_are_read_where_linux_says_it(tmp_path: Path) -> None:
    (tmp_path / "0001:1b:00.0").mkdir()
    (tmp_path / "0001:1b:00.0" / "local_cpulist").write_text("0-3,8,10-11\n")
    assert near_cores(1, 0x1B, 0, tmp_path) == {0, 1, 2, 3, 8, 10, 11}
    assert near_cores(0, 0x1B, 0, tmp_path) == set()
