"""Measure the cost of optimizer offload on a GPU, ours and others', with layers of LLaMA-3.1 8B.

    python -m toolkits.benchmarks offload [--quick] [--layers N] [--sequence N...] [--contenders NAME...]

It needs a GPU. Each sequence length has its own process, in which contenders take turns.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from toolkits.benchmarks._contenders import DeepSpeedTrainer, UpstreamTrainer
from toolkits.benchmarks._report import Aim, Report
from toolkits.benchmarks.gpu_step import FP8, Recipe, Steps, options_of, report_steps

_MOST = {"0.25": 1.01, "auto": 1.03, "1": 1.15, "fp8 auto": 1.15, "fp8 1": 1.15}
"""Our setting -> largest acceptable ratio to the step time without offload, from 8192 tokens on."""
_MOST_OF_SHORT = {"0.25": 1.03, "1": 1.3, "fp8 1": 1.3}
"""Aims that differ for shorter sequences, which have fewer tokens for the same states."""
_MEMORY_SHARE = 0.75
"""Share of the GPU's memory. Upstream's fp32 masters take 2 bytes per parameter more than ours."""
_FRACTIONS = (0.25, 1.0)
_AUTO = {"optimizer_offload_policy": "auto"}
_WEIGHTS = {"data_parallel_sharding": "parameters", "cpu_offloading_weights": True}


def _static(fraction: float) -> dict[str, Any]:
    return {"optimizer_offload_policy": "static", "optimizer_offload_fraction": fraction}


def _upstream(fraction: float) -> Recipe:
    return Recipe(trainer=partial(UpstreamTrainer, overlap={}, offload=fraction))


NONE, NONE_FP8 = "ours: no offload", "ours: fp8"
CONTENDERS = {
    NONE: Recipe(),
    "upstream: no offload": _upstream(0.0),
    **{f"upstream: {fraction:g}": _upstream(fraction) for fraction in _FRACTIONS},
    **{f"ours: {fraction:g}": Recipe(_static(fraction)) for fraction in _FRACTIONS},
    "ours: auto": Recipe(_AUTO),
    "ours: weights": Recipe(_static(1.0) | _WEIGHTS),
    "ours: fp8": Recipe(FP8),
    "ours: fp8 auto": Recipe(FP8 | _AUTO),
    "ours: fp8 1": Recipe(FP8 | _static(1.0)),
    "DeepSpeed: 1": Recipe(trainer=DeepSpeedTrainer, library="deepspeed"),
}
"""Numbers are the share of states on the host: with our policy `static`, upstream's HybridDeviceOptimizer, or
ZeRO-Offload. With `weights`, weights and gradients are on the host too. Random weights have large gradients:
all steps are clipped, so no update is speculative."""
ROUNDS = (3, 1)
OPTIONS = options_of([*CONTENDERS])


def run(arguments: argparse.Namespace) -> Report:
    """Measure and report."""
    return report_steps(arguments, CONTENDERS, _MEMORY_SHARE, aims_of)


def aims_of(steps: Steps, gpu: str) -> list[Aim]:
    """Return the aims. A share of 0.25 is about what the whole 8B model needs on one H200."""
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
