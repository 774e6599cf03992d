"""`--scaling` of `llama-patch plan`: table and plot of LLaMA 8B, 70B and 405B on 8 to 16384 GPUs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkits._arguments import output_file

if TYPE_CHECKING:
    from patch.plan.scaling import Point, Variant
    from patch.plan.timing.machine import Machine

    Curves = Mapping[str, Mapping[Variant, Sequence[Point]]]
    """Points by MODEL_SIZE and variant."""

COUNTS = [2**power for power in range(3, 15)]
"""Numbers of GPUs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--scaling`."""
    parser.add_argument(
        "--scaling", type=output_file, metavar="PNG",
        help="plan LLaMA 8B, 70B, 405B on 8 to 16384 devices of the machine: a table, and this plot",
    )  # fmt: skip


def run(file: Path, machine: Machine, counts: Sequence[int] = COUNTS) -> int:
    """Print the table and write the plot.

    Args:
        file: a PNG.
        machine: what a node is, and the links.
        counts: of GPUs.
    Returns:
        the exit code, 0.
    Raises:
        ConfigError: the machine has no GPUs.
    """
    from patch.errors import ConfigError
    from patch.plan.scaling import LAYOUTS, VARIANTS, scaling

    if not machine.is_gpu:
        raise ConfigError(f"--scaling: got {machine.name}, expected a machine with GPUs (--machine h100)")
    curves = {
        size: {variant: list(scaling(size, machine, counts, variant)) for variant in VARIANTS}
        for size in LAYOUTS
    }
    print(table(machine.name, curves))
    plot(file, machine.name, curves)
    print(f"plot: {file}")
    return 0


def table(name: str, curves: Curves) -> str:
    """MFU of each variant in percent, in lines of text.

    Args:
        name: of the machine.
        curves: what is shown.
    """
    titles = list(next(iter(curves.values())))
    lines = [
        f"Planned, not measured: {name}; 2048 samples of 8192 tokens a step, or one a replica",
        f"{'model':<6}{'GPUs':>7}{'micro-batches':>15}{'s a step':>10}   MFU in %: "
        + ", ".join(variant.title for variant in titles),
    ]
    for size, by_variant in curves.items():
        for points in zip(*by_variant.values(), strict=True):
            first = points[0]
            line = f"{size:<6}{first.gpus:>7}{first.micro_batches:>15}{first.seconds:>10.2f}   "
            lines.append(line + "".join(f"{100 * point.mfu:>8.1f}" for point in points))
    return "\n".join(lines) + "\n"


def plot(file: Path, name: str, curves: Curves) -> None:
    """Draw the efficiency of each model against the number of GPUs, a line for each variant.

    Args:
        file: a PNG.
        name: of the machine.
        curves: what is drawn.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(
        1, len(curves), figsize=(5 * len(curves), 4), layout="constrained", sharey=True
    )
    for axis, (size, by_variant) in zip(axes, curves.items(), strict=True):
        for (variant, points), style in zip(by_variant.items(), ("-o", ":^"), strict=True):
            axis.plot(
                [p.gpus for p in points], [100 * p.efficiency for p in points], style, label=variant.title
            )
        axis.set_xscale("log", base=2)
        axis.set(title=f"LLaMA {size}", xlabel="GPUs", ylim=(0, 100))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of a step that is compute, %")
    axes[0].legend(fontsize="small", loc="lower left")
    canvas.suptitle(f"By plan: {name}")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)
