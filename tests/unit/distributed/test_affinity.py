"""Cores of workers on machines of several NUMA nodes, from a copy of what Linux says of them."""

from pathlib import Path

import pytest

from patch.device import MachineFacts, numa_node
from patch.distributed.launch import cores_of_workers

ONE_NODE = {"node0": "0-15"}
TWO_NODES = {"node0": "0-3,8-11", "node1": "4-7,12-15"}
LOWER, UPPER = {0, 1, 2, 3, 8, 9, 10, 11}, {4, 5, 6, 7, 12, 13, 14, 15}


def machine(*gpu_nodes: int, cores: int = 16) -> MachineFacts:
    return MachineFacts(cuda_devices=len(gpu_nodes), cpu_cores=cores, gpu_nodes=gpu_nodes)


def describe(folder: Path, nodes: dict[str, str]) -> Path:
    for name, cpulist in nodes.items():
        (folder / name).mkdir()
        (folder / name / "cpulist").write_text(f"{cpulist}\n")
    (folder / "online").write_text("0-1\n")
    return folder


@pytest.mark.parametrize(
    ("nodes", "facts", "num_local", "expected"),
    [
        (TWO_NODES, machine(0, 0, 1, 1), 4, [LOWER, LOWER, UPPER, UPPER]),
        (TWO_NODES, machine(1, 0), 2, [UPPER, LOWER]),
        ({**TWO_NODES, "node2": ""}, machine(0, 1), 2, [LOWER, UPPER]),  # one of memory alone
        (TWO_NODES, machine(), 4, []),
        (TWO_NODES, machine(0, cores=4), 1, [LOWER]),
        # no worker is bound: no GPU; one node; a node that is not known; fewer cores than threads
        (ONE_NODE, machine(0, 0), 2, []),
        (TWO_NODES, machine(-1, -1), 2, []),
        (TWO_NODES, machine(0, 2), 2, []),
        (TWO_NODES, machine(0, 1), 1, []),
        (TWO_NODES, machine(0, 0), 2, []),
    ],
)
def test_workers_get_the_cores_of_their_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: dict, facts: MachineFacts,
    num_local: int, expected: list,
) -> None:  # fmt: skip
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert cores_of_workers(facts, num_local, describe(tmp_path, nodes)) == expected


def test_no_worker_gets_a_core_that_the_user_kept_from_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = describe(tmp_path, TWO_NODES)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 4, 5})
    assert cores_of_workers(machine(0, 1, cores=4), 2, nodes) == [{2, 3}, {4, 5}]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3})
    assert cores_of_workers(machine(0, 1, cores=2), 2, nodes) == []


def test_node_of_a_pci_device_is_read_where_linux_says_it(tmp_path: Path) -> None:
    (tmp_path / "0001:1b:00.0").mkdir()
    (tmp_path / "0001:1b:00.0" / "numa_node").write_text("1\n")
    assert numa_node(1, 0x1B, 0, tmp_path) == 1
    assert numa_node(0, 0x1B, 0, tmp_path) == -1
