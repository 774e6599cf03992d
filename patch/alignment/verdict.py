"""From what was measured to an answer: normal or not, in plain words, as JSON, as a table and as a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from patch.alignment.logits import LogitStats
from patch.alignment.report import ONE_FORM, Measured

FP32_MAX = 1e-4
"""Largest difference of a float32 logit that other orders of operations explain."""
HALF_COSINE = 0.999
"""Least cosine of the logits that they explain in bf16 and fp16."""


class Verdict(NamedTuple):
    """The answer to: is this difference normal?"""

    is_normal: bool
    text: str


def judge(found: Measured) -> Verdict:
    """Weigh everything against the bounds; the text names what is wrong and where."""
    faults = [*_stored_faults(found), *_logit_faults(found)]
    if faults:
        return Verdict(False, " ".join(["Not normal.", *faults]))
    return Verdict(True, " ".join(["Normal.", *_praise(found)]))


def _stored_faults(found: Measured) -> Iterator[str]:
    for field, ours, theirs in found.disagreements:
        yield f"{field} is {ours} in the checkpoint, {theirs} by config.json."
    if found.weights:
        name, what = found.weights[0]
        others = "; the report lists the others" if len(found.weights) > 1 else ""
        yield f"{len(found.weights)} of {found.num_weights} weights differ: {name} {what}{others}."


def _logit_faults(found: Measured) -> Iterator[str]:
    if is_exact_expected(found) and found.aligned.max != 0:
        yield (
            f"With --precision-align the logits should be equal to the bit, but differ by "
            f"{found.aligned.max:.3g}; {_where(found)}."
        )
    for form, stats in (("With", found.aligned), ("Without", found.fast)):
        if not is_within_bound(stats, found.precision):
            yield (
                f"{form} --precision-align the logits are beyond the bound of {found.precision}: "
                f"{_far(stats)}, expected {bound(found.precision)}."
            )


def _where(found: Measured) -> str:
    if found.first is None:
        return "no operation differs on the longest prompt"
    layer = "" if found.first.layer is None else f"layer {found.first.layer}'s "
    return f"the first to differ is {layer}{found.first.operation} (by {found.first.max:.3g})"


def is_exact_expected(found: Measured) -> bool:
    """On the CPU both sides use the same kernels in the same order, so every bit is expected to agree."""
    return found.device == "cpu"


def is_within_bound(stats: LogitStats, precision: str) -> bool:
    """Whether other orders of operations explain the difference; not finite numbers never are."""
    if precision == "fp32":
        return stats.max <= FP32_MAX and stats.top1 == 1
    return stats.cosine >= HALF_COSINE


def bound(precision: str) -> str:
    """The bound in words."""
    return f"at most {FP32_MAX:g} and the same top-1" if precision == "fp32" else f"cosine {HALF_COSINE}"


def _far(stats: LogitStats) -> str:
    return f"max {stats.max:.3g}, cosine {stats.cosine:.6f}, top-1 equal in {stats.top1:.1%}"


def _praise(found: Measured) -> Iterator[str]:
    rounding = ", rounded to the checkpoint's type" if found.rounded else ""
    yield f"All {found.num_weights} weights are bit-equal{rounding}."
    flag = f"--precision-align {found.attention}"
    if found.aligned.max == 0:
        yield f"With {flag} the logits are equal to the bit."
    else:
        yield f"With {flag} the logits differ by {found.aligned.max:.3g} on {found.device}."
    if found.fast.max == 0:
        yield "Without it, too."
        return
    source, added = max(found.sources.items(), key=lambda item: item[1])
    most = f", most of it from {source} ({added:.3g})" if added > 0 else ""
    yield (
        f"Without it another order of operations moves them by {found.fast.max:.3g}{most}; {_where(found)}. "
        f"Bound of {found.precision}: {bound(found.precision)}."
    )


def as_json(found: Measured, verdict: Verdict) -> dict[str, Any]:
    """The report; keys are a contract of the toolkit."""
    return {
        "hf": found.hf,
        "mcore": found.mcore,
        "device": found.device,
        "params_dtype": found.precision,
        "attention": found.attention,
        "prompt_lengths": found.prompts,
        "weights_equal": not found.weights,
        "weight_differences": [difference._asdict() for difference in found.weights],
        "config_differences": [difference._asdict() for difference in found.disagreements],
        "logits": found.fast._asdict(),
        "logits_aligned": found.aligned._asdict(),
        "first_difference": found.first._asdict() if found.first else None,
        "sources": found.sources,
        "normal": verdict.is_normal,
        "verdict": verdict.text,
    }


def table(found: Measured) -> list[str]:
    """Lines for people: what each fast form adds, and both forms beside transformers."""
    lines = [f"max |logit difference|, {found.precision} on {found.device}, attention {found.attention}"]
    for name, added in found.sources.items():
        note = "fast and aligned are the same operations" if name in ONE_FORM else ""
        lines.append(f"  {name + ' fast':<18}{added:>12.3g}  {note}".rstrip())
    for name, stats in (("all fast", found.fast), ("all aligned", found.aligned)):
        lines.append(
            f"  {name:<18}{stats.max:>12.3g}  mean {stats.mean:.3g}, KL {stats.kl:.3g}, "
            f"cosine {stats.cosine:.6f}, top-1 equal in {stats.top1:.1%}"
        )
    return lines


def plot(found: Measured, file: Path) -> None:
    """A bar for each source and for all of them, on a logarithmic scale; zeros have no bar."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    values = {**found.sources, "all fast": found.fast.max, "all aligned": found.aligned.max}
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    least = min((value for value in values.values() if value > 0), default=1e-7) / 10
    bars = axes.barh(list(values), [max(value, least) for value in values.values()], left=0)
    axes.bar_label(bars, [f"{value:.2g}" for value in values.values()], padding=3)
    axes.set(xscale="log", xlim=(least, max(values.values()) * 10 or 1), xlabel="max |logit difference|")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.invert_yaxis()
    axes.set_title(f"What each fast form adds: {found.precision}, {found.device}, {found.attention}")
    canvas.print_png(str(file))
