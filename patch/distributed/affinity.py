"""Which cores each worker of this machine gets, where memory lies on several NUMA nodes.

Host memory is then taken on the worker's node, by first touch: the part of the optimizer that runs on the
host reads it from there, and so do copies to the GPU beside it.
"""

from __future__ import annotations

import os
from pathlib import Path

from patch.device import MachineFacts

_NODES = Path("/sys/devices/system/node")


def cores_of_workers(machine: MachineFacts, num_local: int, nodes: Path = _NODES) -> list[set[int]] | None:
    """The cores of each local rank: those of its GPU's node, without GPUs those of its share of the nodes.

    Never more than this process may use; and no fewer than each worker has threads for, so that one GPU of
    a machine of two nodes goes on using both.

    Args:
        machine: local rank i uses its GPU i. nodes: the folder where Linux describes them.
    Returns:
        None where there is one node, or nodes do not fit the workers: then nobody is bound.
    """
    own = os.sched_getaffinity(0)
    cores = {
        int(file.parent.name.removeprefix("node")): own & _numbers(file.read_text())
        for file in nodes.glob("node[0-9]*/cpulist")
    }
    known = sorted(node for node in cores if cores[node])
    if machine.cuda_devices:
        homes = [{node} for node in machine.gpu_nodes[:num_local]]
    else:
        homes = [set(_share(known, local, num_local)) for local in range(num_local)]
    if len(known) < 2 or not all(home <= set(known) for home in homes):
        return None
    shares = [set().union(*(cores[node] for node in home)) for home in homes]
    threads = max(1, machine.cpu_cores // num_local)
    fits = all(share < own and len(share) // shares.count(share) >= threads for share in shares)
    return shares if fits else None


def _share(nodes: list[int], local: int, num_local: int) -> list[int]:
    first = local * len(nodes) // num_local
    return nodes[first : max(first + 1, (local + 1) * len(nodes) // num_local)]


def _numbers(text: str) -> set[int]:
    """Linux's lists: 0-3,8,10-11."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
