"""Measures what optimizer offload costs on a GPU, ours and upstream's, with layers of LLaMA-3.1 8B.

    python -m toolkits.benchmarks.offload [--quick] [--json FILE] [--plot FILE] [--layers N] [--sequence N]

It needs a GPU. Each round runs every contender in a process of its own, so that memory peaks and pinned
memory are its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from toolkits.benchmarks._report import Aim, Report, run_benchmark
from toolkits.benchmarks._runner import needs_gpu
from toolkits.benchmarks.gpu_step import OPTIONS, Recipe, Steps, steps_of

_LIMITS = {4096: 1.03, 8192: 1.01}
"""Sequence length -> largest acceptable ratio of the step time at 0.25 to that without offload."""
_MOST = {"auto": 1.03, "1": 1.3}
_MEMORY_SHARE = 0.75
"""Upstream's fp32 masters take 2 bytes a parameter more than ours."""
_FRACTIONS = (0.25, 0.5, 1.0)
NONE = "ours: no offload"
CONTENDERS = {
    NONE: Recipe(),
    "upstream: no offload": Recipe(upstream=0.0),
    **{f"upstream: {fraction:g}": Recipe(upstream=fraction) for fraction in _FRACTIONS},
    **{
        f"ours: {fraction:g}": Recipe(
            {"optimizer_offload_policy": "static", "optimizer_offload_fraction": fraction}
        )
        for fraction in _FRACTIONS
    },
    "ours: auto": Recipe({"optimizer_offload_policy": "auto"}),
}
"""A number is the share of states on the host, with our `static` or upstream's HybridDeviceOptimizer."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark(_run, argv, rounds=(3, 1), quick="one round of fewer steps", options=OPTIONS)


def _run(arguments: argparse.Namespace) -> Report:
    machine = needs_gpu()
    found = steps_of(CONTENDERS, arguments, machine, _MEMORY_SHARE)
    tables = [steps.table(NONE, machine.cuda_name) for steps in found]
    aims = [aim for steps in found for aim in aims_of(steps)]
    content = {"measured": [steps._asdict() for steps in found]}
    return Report("\n".join(tables), aims, [steps.panel() for steps in found], content)


def aims_of(steps: Steps) -> list[Aim]:
    """The aims; a fraction of 0.25 is about what the whole 8B model needs on one H200."""
    title = f"sequence {steps.sequence}: ours at"
    most = {"0.25": _LIMITS.get(steps.sequence, 1.03), **_MOST}
    aims = [
        Aim(f"{title} {share} / no offload", steps.ratio(f"ours: {share}", NONE), limit)
        for share, limit in most.items()
    ]
    rival = steps.ratio("ours: 0.25", "upstream: 0.25")
    return [*aims, Aim(f"{title} 0.25 / upstream's at 0.25", rival, 1.0)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
