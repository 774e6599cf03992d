"""Medians, ratios, tables and plot of what `parallel` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from toolkits.benchmarks._activation_step import KEEP
from toolkits.benchmarks._context_step import ALL_TO_ALL, COMMUNICATION, COMPUTE, RING, WAITING_RING, WHOLE


@dataclass(frozen=True)
class Bubble:
    """The steps of one pipeline: its bubble is what a step takes beyond its compute, as a share of it."""

    stages: int
    """p, processes."""
    virtual: int
    """v, stages of a process."""
    micro_batches: int
    """m."""
    rounds: dict[float, list[tuple[float, float]]]
    """Seconds of a micro-batch on a process -> in each round, seconds of the step, and of compute in it."""

    @property
    def formula(self) -> float:
        """(p - 1) / (v m)."""
        return (self.stages - 1) / (self.virtual * self.micro_batches)

    def at(self, wait_s: float) -> float:
        """The bubble, with the costs of messages and of the schedule."""
        return median(step / compute for step, compute in self.rounds[wait_s]) - 1

    @property
    def without_constant(self) -> float:
        """The bubble without what a step costs however short its compute is: from two lengths of waiting."""
        short, long = (self.rounds[wait_s] for wait_s in (min(self.rounds), max(self.rounds)))
        steps, computes = ([median(column) for column in zip(*rows, strict=True)] for rows in (short, long))
        return (computes[0] - steps[0]) / (computes[1] - steps[1]) - 1


@dataclass(frozen=True)
class ContextFigures:
    """The rounds at one speed of the cable.

    Ratios are medians over rounds of the ratio within a round.
    """

    share: float
    """The messages' time as a share of the compute's, as it was set."""
    mbit: float
    bytes: int
    """That a rank sends in a step of the ring."""
    rounds: list[dict[str, float]]
    """Contender -> seconds of a step."""

    def over_bound(self, name: str) -> float:
        """The step time divided by max(compute, messages), the time with perfect overlap."""
        return median(one[name] / max(one[COMPUTE], one[COMMUNICATION]) for one in self.rounds)

    def over_whole(self, name: str) -> float:
        """The step time divided by that of one rank with whole sequences."""
        return median(one[name] / one[WHOLE] for one in self.rounds)


def bubble_table(bubbles: Sequence[Bubble]) -> str:
    """A line for each pipeline."""
    waits = sorted(bubbles[0].rounds)
    columns = "".join(f"{f'{wait_s * 1e3:.0f} ms':>10}{'/ formula':>11}" for wait_s in waits)
    lines = [f"{'p':>2}{'v':>3}{'m':>4}{'formula':>9}{columns}{'no constant':>13}{'/ formula':>11}"]
    for one in bubbles:
        found = [*(one.at(wait_s) for wait_s in waits), one.without_constant]
        widths = [10] * len(waits) + [13]
        cells = "".join(
            f"{value:>{width}.3f}{value / one.formula:>11.3f}"
            for value, width in zip(found, widths, strict=True)
        )
        lines.append(f"{one.stages:>2}{one.virtual:>3}{one.micro_batches:>4}{one.formula:>9.4f}{cells}")
    return "\n".join(lines) + "\n"


def context_table(figures: Sequence[ContextFigures]) -> str:
    """A table for each speed."""
    lines = []
    for one in figures:
        lines.append(
            f"{one.bytes / 1e6:.1f} MB a rank and step over {one.mbit:.0f} Mbit/s each way\n"
            f"{'':<24}{'median s':>10}{'fastest - slowest':>20}{'/ bound':>9}{'/ CP=1':>8}"
        )
        for name in (WHOLE, RING, WAITING_RING, ALL_TO_ALL, COMPUTE, COMMUNICATION):
            seconds = [round_[name] for round_ in one.rounds]
            spread = f"{min(seconds):.3f} - {max(seconds):.3f}"
            lines.append(
                f"{name:<24}{median(seconds):>10.3f}{spread:>20}"
                f"{one.over_bound(name):>9.3f}{one.over_whole(name):>8.3f}"
            )
        lines.append("")
    return "\n".join(lines)


def activation_table(rounds: dict[str, list[dict[str, float]]]) -> str:
    """A line for each way; see `_activation_step.measure`."""
    head = f"{'':<30}{'median s':>10}{'fastest - slowest':>20}{'/ keep all':>12}{'peak MiB':>10}"
    lines = [f"{head}{'to host MiB':>13}{'waited s':>10}"]
    for name, found in rounds.items():
        middle = {key: median(one[key] for one in found) for key in found[0]}
        seconds = [one["seconds"] for one in found]
        ratio = median(one / kept["seconds"] for one, kept in zip(seconds, rounds[KEEP], strict=True))
        lines.append(
            f"{name:<30}{middle['seconds']:>10.3f}{f'{min(seconds):.3f} - {max(seconds):.3f}':>20}"
            f"{ratio:>12.3f}{middle['peak_bytes'] / 2**20:>10.1f}"
            f"{middle.get('sent_bytes', 0) / 2**20:>13.1f}{middle.get('waited_s', 0):>10.3f}"
        )
    return "\n".join(lines) + "\n"


def plot(file: Path, bubbles: Sequence[Bubble], figures: Sequence[ContextFigures]) -> None:
    """Bubbles against the formula, and bars of step times at each speed of the cable."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = 1 + len(figures)
    canvas, axes = pyplot.subplots(1, width, figsize=(5 * width, 4), layout="constrained", squeeze=False)
    first, *others = axes[0]
    for one in bubbles:
        for wait_s in sorted(one.rounds):
            first.scatter(
                one.formula, one.at(wait_s), color="tab:blue" if one.virtual == 1 else "tab:orange", s=9
            )
    largest = max((one.formula for one in bubbles), default=1.0)
    first.plot([0, largest], [0, largest], color="gray", linestyle="--", label="formula")
    first.set(xlabel="(p - 1) / (v m)", ylabel="bubble / compute (orange: v = 2)")
    first.legend()
    for axis, found in zip(others, figures, strict=True):
        names = [ALL_TO_ALL, WAITING_RING, RING, WHOLE]
        axis.barh(names, [median(one[name] for one in found.rounds) for name in names])
        for name, style in ((COMPUTE, "--"), (COMMUNICATION, ":")):
            axis.axvline(
                median(one[name] for one in found.rounds), color="black", linestyle=style, label=name
            )
        axis.set(xlabel=f"seconds a step at {found.mbit:.0f} Mbit/s")
        axis.legend(fontsize="small")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)
