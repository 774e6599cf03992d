"""Which cores each worker may use, on a machine with several NUMA nodes.

A worker that is bound to a node gets its host memory there, by first touch. The part of the optimizer that
runs on the host, and copies to the node's GPU, then read memory of their own node.
"""

from __future__ import annotations

import os
from pathlib import Path

from patch.device import MachineFacts

_NODES = Path("/sys/devices/system/node")


def cores_of_workers(machine: MachineFacts, num_local: int, nodes: Path = _NODES) -> list[set[int]] | None:
    """The cores of each local rank: those of its GPU's node, without GPUs those of its share of the nodes.

    No worker gets cores that this process may not use, or fewer cores than it has threads: with one GPU on
    a machine with two nodes, the worker uses both nodes.

    Args:
        machine: the machine, whose GPU i belongs to local rank i.
        num_local: the number of local ranks.
        nodes: the folder where Linux describes the NUMA nodes.
    Returns:
        None if no worker should be bound: there is one node, or the nodes do not suit the workers.
    """
    own = os.sched_getaffinity(0)
    cores = {
        int(file.parent.name.removeprefix("node")): own & _numbers(file.read_text())
        for file in nodes.glob("node[0-9]*/cpulist")
    }
    usable = sorted(node for node in cores if cores[node])
    if machine.cuda_devices:
        homes = [{node} for node in machine.gpu_nodes[:num_local]]
    else:
        homes = [set(_share(usable, local, num_local)) for local in range(num_local)]
    if len(usable) < 2 or not all(home <= set(usable) for home in homes):
        return None
    shares = [set().union(*(cores[node] for node in home)) for home in homes]
    threads = max(1, machine.cpu_cores // num_local)
    # All workers of a node share its cores; a share of all cores would bind to nothing.
    fits = all(share < own and len(share) // shares.count(share) >= threads for share in shares)
    return shares if fits else None


def _share(nodes: list[int], local: int, num_local: int) -> list[int]:
    """The part of the nodes that one local rank uses: at least one node."""
    first = local * len(nodes) // num_local
    return nodes[first : max(first + 1, (local + 1) * len(nodes) // num_local)]


def _numbers(text: str) -> set[int]:
    """The numbers in a list as Linux writes it, such as 0-3,8,10-11."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
