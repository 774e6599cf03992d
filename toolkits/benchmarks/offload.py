"""Measures what optimizer offload costs on a GPU, ours and others', with layers of LLaMA-3.1 8B.

    python -m toolkits.benchmarks.offload [--quick] [--json FILE] [--plot FILE] [--layers N] [--sequence N]
        [--contenders NAME...]

It needs a GPU. A process for each length, in which contenders take turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from toolkits.benchmarks._report import Aim, Report, run_benchmark
from toolkits.benchmarks._runner import needs_gpu
from toolkits.benchmarks.gpu_step import FP8, OPTIONS, Recipe, Steps, steps_of

_MOST = {"0.25": 1.01, "auto": 1.03, "1": 1.15, "fp8 auto": 1.15, "fp8 1": 1.15}
"""Ours -> largest acceptable ratio of the step time to that without offload, from 8192 tokens on."""
_MOST_OF_SHORT = {"0.25": 1.03, "1": 1.3, "fp8 1": 1.3}
"""Of shorter sequences, where it differs: fewer tokens for as many states."""
_MEMORY_SHARE = 0.75
"""Upstream's fp32 masters take 2 bytes a parameter more than ours."""
_FRACTIONS = (0.25, 0.5, 1.0)
_AUTO = {"optimizer_offload_policy": "auto"}
_WEIGHTS = {"data_parallel_sharding": "parameters", "cpu_offloading_weights": True}


def _static(fraction: float) -> dict[str, Any]:
    return {"optimizer_offload_policy": "static", "optimizer_offload_fraction": fraction}


NONE, NONE_FP8 = "ours: no offload", "ours: fp8"
CONTENDERS = {
    NONE: Recipe(),
    "upstream: no offload": Recipe(upstream=0.0),
    **{f"upstream: {fraction:g}": Recipe(upstream=fraction) for fraction in _FRACTIONS},
    **{f"ours: {fraction:g}": Recipe(_static(fraction)) for fraction in _FRACTIONS},
    "ours: auto": Recipe(_AUTO),
    "ours: weights": Recipe(_static(1.0) | _WEIGHTS),
    "ours: fp8": Recipe(FP8),
    "ours: fp8 auto": Recipe(FP8 | _AUTO),
    "ours: fp8 1": Recipe(FP8 | _static(1.0)),
    "DeepSpeed: 1": Recipe(is_deepspeed=True),
}
"""A number is the share of states on the host, with our `static`, upstream's HybridDeviceOptimizer, or
ZeRO-Offload; `weights`: they and their gradients are there too."""
_WHICH = {"nargs": "+", "choices": [*CONTENDERS], "default": [*CONTENDERS], "help": "which (all)"}
_OPTIONS = OPTIONS | {"--contenders": _WHICH}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and report."""
    return run_benchmark(_run, argv, rounds=(3, 1), quick="one round of fewer steps", options=_OPTIONS)


def _run(arguments: argparse.Namespace) -> Report:
    machine = needs_gpu()
    is_there = find_spec("deepspeed") is not None
    names = [name for name in arguments.contenders if is_there or not CONTENDERS[name].is_deepspeed]
    contenders = {name: CONTENDERS[name] for name in names}
    found = steps_of(contenders, arguments, machine, _MEMORY_SHARE)
    tables = [steps.table(NONE, machine.cuda_name) for steps in found]
    aims = [aim for steps in found for aim in aims_of(steps)]
    content = {"measured": [steps._asdict() for steps in found]}
    return Report("\n".join(tables), aims, [steps.panel() for steps in found], content)


def aims_of(steps: Steps) -> list[Aim]:
    """The aims; a fraction of 0.25 is about what the whole 8B model needs on one H200."""
    title = f"sequence {steps.sequence}: ours at"
    limits = _MOST | (_MOST_OF_SHORT if steps.sequence < 8192 else {})
    aims = []
    for share, limit in limits.items():
        name, base = f"ours: {share}", NONE_FP8 if "fp8" in share else NONE
        if {name, base} <= {*steps.rounds}:
            aims.append(Aim(f"{title} {share} / no offload", steps.ratio(name, base), limit))
    if {"ours: 0.25", "upstream: 0.25"} <= {*steps.rounds}:
        rival = steps.ratio("ours: 0.25", "upstream: 0.25")
        aims.append(Aim(f"{title} 0.25 / upstream's at 0.25", rival, 1.0))
    return aims


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
