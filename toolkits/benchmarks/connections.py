"""Measures what CUDA_DEVICE_MAX_CONNECTIONS costs: do copies and small kernels run beside queued products?

    python -m toolkits.benchmarks.connections [--quick] [--json FILE] [--plot FILE]

It needs a GPU. Each value has a process of its own, as the driver reads the variable when it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from toolkits.benchmarks._report import Aim, aim_lines, argument_parser, write_json

_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_VALUES = ("1", "8", "32")
"""Megatron-LM's with TP on Hopper, the driver's default, the most."""
_ROUNDS, _QUICK_ROUNDS = 9, 3
_TIMEOUT_S = 120
_MOST = 1.05
_SIZE, _NUM_PRODUCTS = 8192, 40
_COPY_BYTES, _NUM_COPIES = 2**26, 24


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report; returns 0 also without a GPU."""
    parser = argument_parser("connections", __doc__, f"{_QUICK_ROUNDS} rounds instead of {_ROUNDS}")
    arguments = parser.parse_args(argv)
    import torch

    if not torch.cuda.is_available():
        print("not run: needs a GPU, found none")
        return 0
    rounds = _QUICK_ROUNDS if arguments.quick else _ROUNDS
    found = {value: _in_process(value, rounds) for value in _VALUES}
    print("| connections | products ms | copies ms | both ms | both / longer | first small kernel after ms |")
    print("| --- | --- | --- | --- | --- | --- |")
    for value, one in found.items():
        cells = [one["products"], one["copies"], one["both"], _exposed(one), one["small kernel"]]
        print(f"| {value} | " + " | ".join(f"{cell:.2f}" for cell in cells) + " |")
    aims = [Aim(f"{value}: both / longer of the two", _exposed(one), _MOST) for value, one in found.items()]
    print("\n".join(aim_lines(aims)))
    if arguments.json:
        write_json(arguments.json, aims, measured=found)
    _plot(arguments.plot, found)
    print(f"plot: {arguments.plot}")
    return 0


def _exposed(one: dict[str, float]) -> float:
    return one["both"] / max(one["products"], one["copies"])


def _plot(file: Path, found: dict[str, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axis = pyplot.subplots(figsize=(6, 3), layout="constrained")
    axis.bar(list(found), [_exposed(one) for one in found.values()])
    axis.set(xlabel=_VARIABLE, ylabel="both / longer of the two")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)


def _in_process(value: str, rounds: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "toolkits.benchmarks.connections",
        "measure",
        str(rounds),
    ]
    done = subprocess.run(
        command, env={**os.environ, _VARIABLE: value}, timeout=_TIMEOUT_S, check=True, stdout=subprocess.PIPE
    )
    return json.loads(done.stdout.splitlines()[-1])


def measure(rounds: int) -> dict[str, float]:
    """Medians in ms of products alone, copies to the host alone, both, and of when a small kernel ends.

    The small kernel is on a third stream, queued when all products are, as one of NCCL's would be.
    """
    import torch

    factor = torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16)
    product, small = torch.empty_like(factor), torch.zeros(1024, device="cuda")
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    copying, other = torch.cuda.Stream(), torch.cuda.Stream()

    def products() -> None:
        for _ in range(_NUM_PRODUCTS):
            torch.mm(factor, factor, out=product)

    def copies() -> None:
        with torch.cuda.stream(copying):
            for _ in range(_NUM_COPIES):
                target.copy_(source, non_blocking=True)

    def both() -> None:
        products()
        copies()

    def small_kernel() -> None:
        products()
        with torch.cuda.stream(other):
            small.add_(1.0)

    def timed(work: Callable[[], None], until: torch.cuda.Stream | None = None) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        (until or torch.cuda).synchronize()
        return (time.perf_counter() - begin) * 1e3

    works: dict[str, tuple[Callable[[], None], torch.cuda.Stream | None]] = {
        "products": (products, None),
        "copies": (copies, None),
        "both": (both, None),
        "small kernel": (small_kernel, other),
    }
    for work, _ in works.values():
        timed(work)
    return {name: median(timed(work, until) for _ in range(rounds)) for name, (work, until) in works.items()}


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(int(sys.argv[2]))))
        sys.exit()
    sys.exit(main(sys.argv[1:]))
