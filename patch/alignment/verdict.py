"""From what was measured to an answer in plain words: is this difference normal?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from patch.alignment.logits import LogitStats
from patch.alignment.measure import Measurement

FP32_MAX = 1e-4
"""Largest difference of a float32 logit that other orders of operations explain."""
HALF_COSINE = 0.999
"""Least cosine of the logits that they explain in bf16 and fp16."""


class Verdict(NamedTuple):
    """The answer to: is this difference normal?"""

    is_normal: bool
    text: str


def judge(found: Measurement) -> Verdict:
    """Compare everything with its bound; the text names what is wrong and where."""
    faults = [*_stored_faults(found), *_logit_faults(found)]
    if faults:
        return Verdict(False, " ".join(["Not normal.", *faults]))
    return Verdict(True, " ".join(["Normal.", *_good_news(found)]))


def _stored_faults(found: Measurement) -> Iterator[str]:
    for field, ours, theirs in found.config_differences:
        yield f"{field} is {ours} in the checkpoint, {theirs} by config.json."
    differences = found.weights.differences
    if differences:
        name, what = differences[0]
        others = "; the report lists the others" if len(differences) > 1 else ""
        yield f"{len(differences)} of {found.weights.num_tensors} weights differ: {name} {what}{others}."


def _logit_faults(found: Measurement) -> Iterator[str]:
    if _is_exact_expected(found) and found.logits.aligned.max != 0:
        yield (
            f"With --precision-align the logits should be equal to the bit, but differ by "
            f"{found.logits.aligned.max:.3g}; {_first_difference_text(found)}."
        )
    for form, stats in (("With", found.logits.aligned), ("Without", found.logits.fast)):
        if not _is_within_bound(stats, found.precision):
            yield (
                f"{form} --precision-align the logits are beyond the bound of {found.precision}: "
                f"{_stats_text(stats)}, expected {_bound_text(found.precision)}."
            )


def _first_difference_text(found: Measurement) -> str:
    if found.logits.first is None:
        return "no operation differs on the longest prompt"
    layer = "" if found.logits.first.layer is None else f"layer {found.logits.first.layer}'s "
    return f"the first to differ is {layer}{found.logits.first.operation} (by {found.logits.first.max:.3g})"


def _is_exact_expected(found: Measurement) -> bool:
    """On the CPU both sides use the same kernels in the same order, so every bit is expected to agree."""
    return found.device == "cpu"


def _is_within_bound(stats: LogitStats, precision: str) -> bool:
    """Whether another order of operations explains the difference; it explains no NaN and no infinity."""
    if precision == "fp32":
        return stats.max <= FP32_MAX and stats.top1 == 1
    return stats.cosine >= HALF_COSINE


def _bound_text(precision: str) -> str:
    """The bound in words."""
    return f"at most {FP32_MAX:g} and the same top-1" if precision == "fp32" else f"cosine {HALF_COSINE}"


def _stats_text(stats: LogitStats) -> str:
    return f"max {stats.max:.3g}, cosine {stats.cosine:.6f}, top-1 equal in {stats.top1:.1%}"


def _good_news(found: Measurement) -> Iterator[str]:
    rounding = ", rounded to the checkpoint's type" if found.weights.is_rounded else ""
    yield f"All {found.weights.num_tensors} weights are bit-equal{rounding}."
    flag = f"--precision-align {found.attention}"
    if found.logits.aligned.max == 0:
        yield f"With {flag} the logits are equal to the bit."
    else:
        yield f"With {flag} the logits differ by {found.logits.aligned.max:.3g} on {found.device}."
    if found.logits.fast.max == 0:
        yield "Without it, too."
        return
    source, added = max(found.logits.sources.items(), key=lambda item: item[1])
    most = f", most of it from {source} ({added:.3g})" if added > 0 else ""
    yield (
        f"Without it another order of operations moves them by {found.logits.fast.max:.3g}{most}; "
        f"{_first_difference_text(found)}. Bound of {found.precision}: {_bound_text(found.precision)}."
    )
