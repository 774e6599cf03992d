"""Measures what optimizer offload costs on a GPU, ours and upstream's, with layers of LLaMA-3.1 8B.

    python -m toolkits.benchmarks.offload [--quick] [--json FILE] [--plot FILE] [--layers N] [--sequence N]

First it prints what a step waits for by plan. The rest needs a GPU. Each round runs every contender in a
process of its own, so that memory peaks and pinned memory are its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from patch.plan.timing.machine_presets import PRESETS
from patch.plan.timing.step_time import step_time
from toolkits.benchmarks._report import Aim, Report, run_benchmark
from toolkits.benchmarks._runner import needs_gpu
from toolkits.benchmarks.gpu_step import OPTIONS, Recipe, Steps, step_run, steps_of

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
            optimizer={"optimizer_offload_policy": "static", "optimizer_offload_fraction": fraction}
        )
        for fraction in _FRACTIONS
    },
    "ours: auto": Recipe(optimizer={"optimizer_offload_policy": "auto"}),
}
"""A number is the share of states on the host, with our `static` or upstream's HybridDeviceOptimizer."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark(_run, argv, rounds=(3, 1), quick="one round of fewer steps", options=OPTIONS)


def _run(arguments: argparse.Namespace) -> Report:
    print(plan_text())
    machine = needs_gpu()
    found = steps_of(CONTENDERS, arguments, machine, _MEMORY_SHARE)
    tables = [steps.table(NONE, machine.cuda_name) for steps in found]
    aims = [aim for steps in found for aim in aims_of(steps)]
    content = {"measured": [steps._asdict() for steps in found]}
    return Report("\n".join(tables), aims, [steps.panel() for steps in found], content)


def plan_text() -> str:
    """The plan of all layers of 8B on one H100, sequences of 8192 tokens: a prediction, not measured."""
    machine = PRESETS["h100"]
    base = step_time(step_run(CONTENDERS[NONE], 32, 8192), machine).seconds
    lines = [f"PLAN, not measured: 8B, one sequence of 8192 tokens, {machine.name}: {base:.2f} s a step"]
    for fraction in _FRACTIONS:
        step = step_time(step_run(CONTENDERS[f"ours: {fraction:g}"], 32, 8192), machine)
        (part,) = (part for part in step.parts if "host" in part.name and "exposed" in part.name)
        said = f"{part.seconds:.2f} s exposed, {step.seconds / base:.2f} of none: {part.formula}"
        lines.append(f"  {fraction:g} on the host: {said}")
    return "\n".join(lines) + "\n"


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
