"""Medians, ratios, table and plot of the rounds of `overlap` and `tensor_parallel`."""

from __future__ import annotations

from pathlib import Path
from statistics import median, quantiles

COMPUTE, COMMUNICATION = "compute alone", "communication alone"
ALL_TO_ALL = "upstream: both, all-to-all"


class Figures:
    """The rounds in one setting.

    Ratios are medians over rounds of the ratio within a round, because other work on the machine changes from
    minute to minute and affects all contenders of a round equally.

    Args:
        rounds: name -> one record per round, whose "seconds" are the time of a step on the slower rank.
    """

    def __init__(self, rounds: dict[str, list[dict[str, float]]]) -> None:
        self.seconds = {name: [one["seconds"] for one in found] for name, found in rounds.items()}
        self.best_ours = self._best("ours")
        self.best_upstream = self._best("upstream")
        self.best_plain_upstream = self._best("upstream", besides=ALL_TO_ALL)

    def ratio(self, name: str, other: str) -> float:
        """The step time of `name` divided by the step time of `other`."""
        return _ratio(self.seconds[name], self.seconds[other])

    def over_bound(self, name: str) -> float:
        """The step time divided by max(compute, communication), the time with perfect overlap."""
        return _ratio(self.seconds[name], list(map(max, self.seconds[COMPUTE], self.seconds[COMMUNICATION])))

    def best_possible(self, name: str) -> float:
        """max(compute, communication) divided by the step time of `name`: no ratio to it can be smaller."""
        return 1 / self.over_bound(name)

    def spread(self, name: str) -> tuple[float, float, float]:
        """Lower quartile, median and upper quartile, in seconds."""
        seconds = self.seconds[name]
        if len(seconds) == 1:
            return seconds[0], seconds[0], seconds[0]
        lower, middle, upper = quantiles(seconds, n=4, method="inclusive")
        return lower, middle, upper

    def _best(self, prefix: str, besides: str = "") -> str:
        names = [name for name in self.seconds if name.startswith(prefix) and name != besides]
        return min(names, key=lambda name: median(self.seconds[name]))


def _ratio(these: list[float], those: list[float]) -> float:
    return median(this / that for this, that in zip(these, those, strict=True))


def table(title: str, figures: Figures) -> str:
    """A text table of the contenders, sorted by median step time."""
    bound = "/ max(compute, comm.)"
    lines = [f"{title:<29}{'median s':>10}{'quartiles':>18}{bound:>24}{'/ upstream':>12}"]
    for name in sorted(figures.seconds, key=lambda name: median(figures.seconds[name])):
        lower, middle, upper = figures.spread(name)
        line = f"{name:<29}{middle:>10.3f}{f'{lower:.3f} - {upper:.3f}':>18}"
        if name not in (COMPUTE, COMMUNICATION):
            line += f"{figures.over_bound(name):>24.3f}{figures.ratio(name, figures.best_upstream):>12.3f}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def plot(file: Path, figures: dict[str, Figures]) -> None:
    """Draw bars of step times with quartiles, and lines for compute and communication alone.

    Args:
        file: a PNG.
        figures: by the title of each setting.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    canvas, axes = pyplot.subplots(1, len(figures), figsize=(6.5 * len(figures), 4), layout="constrained")
    for axis, (title, found) in zip(axes, figures.items(), strict=True):
        names = [name for name in reversed(found.seconds) if name not in (COMPUTE, COMMUNICATION)]
        spreads = [found.spread(name) for name in names]
        middles = [middle for _, middle, _ in spreads]
        errors = [[m - low for low, m, _ in spreads], [high - m for _, m, high in spreads]]
        colors = ["tab:blue" if name.startswith("ours") else "tab:gray" for name in names]
        axis.barh(names, middles, xerr=errors, color=colors)
        for name, style in ((COMPUTE, "--"), (COMMUNICATION, ":")):
            axis.axvline(median(found.seconds[name]), linestyle=style, color="black", label=name)
        axis.set(title=title, xlabel="seconds a step (median, quartiles)")
        axis.legend(fontsize="small")
    canvas.savefig(file, dpi=120)
    pyplot.close(canvas)
