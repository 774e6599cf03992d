"""Measures updates of optimizer states that lie on a disk beside what the disk does with plain direct I/O.

    python -m toolkits.benchmarks.disk [--quick] [--folder FOLDER] [--gib N] [--json FILE] [--plot FILE]

Contenders take turns; each reads and writes all states once, past the page cache, in requests of one state
of a chunk. Ours reads ahead, updates and writes behind, and ends when all is written. All chunks share one
gradient, so that memory is for nothing but buffers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import torch

from patch.config.schema import OptimizerConfig
from patch.errors import TrainingError
from patch.memory import HOST, UNLIMITED, DiskMemory, SimulatedDevice, on_host
from patch.optimizer.chunk import BucketShard, ShardRange
from patch.optimizer.hybrid_adam import HybridAdam
from patch.optimizer.offload import Offload
from patch.optimizer.param_groups import ParamGroup
from patch.optimizer.placement import StaticPlacementPolicy
from toolkits.benchmarks._measure import Rounds, take_turns, time_call
from toolkits.benchmarks._report import Aim, NotRunError, Report, run_benchmark
from toolkits.benchmarks._runner import CPU

_NUMEL = 32 << 20
"""Elements of a chunk: requests of 64 and 128 MiB, in bf16."""
_BYTES_EACH = 10
"""Of an element's states."""
OURS, PLAIN = "ours, with the update", "plain loop"


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    options = {
        "--folder": {"type": Path, "default": Path(tempfile.gettempdir()), "help": "on the disk (TMPDIR)"},
        "--gib": {"type": float, "default": 8.0, "help": "GiB of states; the disk needs twice as much (8)"},
    }
    return run_benchmark(_run, argv, rounds=(5, 2), options=options)


def _run(arguments: argparse.Namespace) -> Report:
    try:
        ours = _Ours(arguments.folder, max(4, round(arguments.gib * 2**30 / _NUMEL / _BYTES_EACH)))
        plain = _Plain(arguments.folder, [state.nbytes for state in ours.states])
    except (OSError, TrainingError) as error:  # no room, or no direct I/O
        raise NotRunError(f"{arguments.folder}: {error}") from error
    calls = {OURS: ours.update, PLAIN: plain.transfer}
    for call in calls.values():
        call()  # the first write to reserved room is slower
    timed = {name: partial(time_call, call, CPU) for name, call in calls.items()}
    turns = take_turns(timed, arguments.rounds)
    times = Rounds({name: [seconds.wall for seconds in found] for name, found in turns.items()})
    num_bytes = 2 * sum(plain.sizes)

    def speed(name: str) -> str:
        return f"{num_bytes / median(times.values[name]) / 1e9:.2f}"

    head = f"{num_bytes / 2**31:.1f} GiB read and written in {arguments.folder}\n"
    text = f"{head}\n{times.table('', PLAIN, {'GB/s': speed})}"
    aims = [Aim(f"time of {OURS} / {PLAIN}", times.ratio(OURS, PLAIN), 1 / 0.8)]
    return Report(text, aims, [times.panel()], {"num_bytes": num_bytes, "rounds": times.values})


class _Ours:
    """The optimizer's updates of chunks on the disk."""

    def __init__(self, folder: Path, num_chunks: int) -> None:
        grad, param = (torch.full((_NUMEL,), 1e-3, dtype=torch.bfloat16) for _ in range(2))
        shard = BucketShard(grad, param, [ShardRange(0, _NUMEL, 0, needs_extra_reduction=False)])
        device, policy = SimulatedDevice(UNLIMITED), StaticPlacementPolicy(1.0)
        offload = Offload(device, policy, _NUMEL, 0, DiskMemory(folder), 0)
        self._adam = HybridAdam(
            [shard] * num_chunks, OptimizerConfig(lr=1e-4), [ParamGroup([], weight_decay=0.1)], offload
        )

    @property
    def states(self) -> list[torch.Tensor]:
        return [state.data for chunk in self._adam.manager.chunks for state in chunk.states.values()]

    def update(self) -> None:
        self._adam.start_update(1e-4, 1.0)
        for index in range(len(self._adam.shards)):
            self._adam.wait_for_update(index, block=True)
        for state in self.states:
            on_host(state[:1])  # waits until it is written


class _Plain:
    """A file of the same size, and reads and writes of the same sizes."""

    def __init__(self, folder: Path, sizes: list[int]) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it ends with this object
        self.sizes = sizes
        os.posix_fallocate(self._file.fileno(), 0, sum(sizes))
        self._direct = os.open(f"/proc/self/fd/{self._file.fileno()}", os.O_RDWR | os.O_DIRECT)
        self._memory = HOST.allocate(max(sizes), torch.uint8).random_().numpy().data

    def transfer(self) -> None:
        begin = 0
        for size in self.sizes:
            for call in (os.preadv, os.pwritev):
                done = call(self._direct, [self._memory[:size]], begin)
                assert done == size, "the disk is full or fails"
            begin += size


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
