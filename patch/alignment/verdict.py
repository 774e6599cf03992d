"""Verdict on a measurement, in plain words: is this difference normal?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from patch.alignment.logits import LogitStats
from patch.alignment.measure import Measurement

FP32_MAX = 1e-4
"""Largest difference of a float32 logit that a different order of operations explains."""
HALF_COSINE = 0.999
"""Smallest cosine of the logits that a different order of operations explains in bf16 and fp16."""


TIES = {"fp32": 1e-4, "fp16": 2**-8, "bf16": 2**-5}
"""Largest gap between the logits of two experts that rounding explains, as a share of the layer's largest."""


class Verdict(NamedTuple):
    """Answer to the question: is this difference normal?"""

    is_normal: bool
    text: str


def judge(measured: Measurement) -> Verdict:
    """Compare the measured values with their bounds; the text says what is wrong and where."""
    faults = [*_stored_faults(measured), *_route_faults(measured), *_logit_faults(measured)]
    if faults:
        return Verdict(False, " ".join(["Not normal.", *faults]))
    return Verdict(True, " ".join(["Normal.", *_good_news(measured)]))


def _stored_faults(measured: Measurement) -> Iterator[str]:
    for field, ours, theirs in measured.config_differences:
        yield f"{field} is {ours} in the checkpoint, {theirs} by config.json."
    differences = measured.weights.differences
    if differences:
        name, what = differences[0]
        others = "; the report lists the others" if len(differences) > 1 else ""
        yield f"{len(differences)} of {measured.weights.num_tensors} weights differ: {name} {what}{others}."


def _logit_faults(measured: Measurement) -> Iterator[str]:
    if _is_exact_expected(measured) and measured.logits.aligned.max != 0:
        yield (
            f"With --precision-align the logits should be bit-equal, but differ by "
            f"{measured.logits.aligned.max:.3g}; {_first_difference_text(measured)}."
        )
    for form, stats in (("With", measured.logits.aligned), ("Without", measured.logits.fast)):
        if not _is_within_bound(stats, measured.precision):
            yield (
                f"{form} --precision-align the logits are beyond the bound of {measured.precision}: "
                f"max {stats.max:.3g}, cosine {stats.cosine:.6f}, top-1 equal in {stats.top1:.1%}, "
                f"expected {_bound_text(measured.precision)}."
            )


def _route_faults(measured: Measurement) -> Iterator[str]:
    routes, bound = measured.logits.routes, TIES[measured.precision]
    if routes is not None and not routes.largest_gap <= bound:
        yield (
            f"{_routes_text(measured)}, but a tie is a gap of at most {bound:.3g}: the weight of a router is "
            "wrong, or what it is given."
        )


def _routes_text(measured: Measurement) -> str:
    routes = measured.logits.routes
    assert routes is not None
    return (
        f"{routes.differing} of {routes.tokens} tokens would go to other experts, with logits apart by up to "
        f"{routes.largest_gap:.3g} of the largest"
    )


def _first_difference_text(measured: Measurement) -> str:
    first = measured.logits.first
    if first is None:
        return "no operation differs on the longest prompt"
    layer = "" if first.layer is None else f"layer {first.layer}'s "
    return f"the first to differ is {layer}{first.operation} (by {first.max:.3g})"


def _is_exact_expected(measured: Measurement) -> bool:
    """Whether the logits must be bit-equal: on a CPU both models use the same kernels in the same order."""
    return measured.device == "cpu" and bool(measured.logits.sources)


def _is_within_bound(stats: LogitStats, precision: str) -> bool:
    """Whether a different order of operations explains the difference; it never explains NaN or infinity."""
    if precision == "fp32":
        return stats.max <= FP32_MAX and stats.top1 == 1
    return stats.cosine >= HALF_COSINE


def _bound_text(precision: str) -> str:
    return f"at most {FP32_MAX:g} and the same top-1" if precision == "fp32" else f"cosine {HALF_COSINE}"


def _good_news(measured: Measurement) -> Iterator[str]:
    rounding = ", rounded to the checkpoint's type" if measured.weights.is_rounded else ""
    yield f"All {measured.weights.num_tensors} weights are bit-equal{rounding}."
    if measured.logits.routes is not None:
        ties = ": ties" if measured.logits.routes.differing else ""
        yield f"{_routes_text(measured)}{ties}; the logits are those with transformers' experts."
    bound = f"Bound of {measured.precision}: {_bound_text(measured.precision)}."
    if not measured.logits.sources:
        yield f"The logits differ by {measured.logits.fast.max:.3g}; {_first_difference_text(measured)}."
        yield f"{bound} These layers have no --precision-align."
        return
    flag = f"--precision-align {measured.attention}"
    if measured.logits.aligned.max == 0:
        yield f"With {flag} the logits are bit-equal."
    else:
        yield f"With {flag} the logits differ by {measured.logits.aligned.max:.3g} on {measured.device}."
    if measured.logits.fast.max == 0:
        yield "Without it they are bit-equal too."
        return
    source, added = max(measured.logits.sources.items(), key=lambda item: item[1])
    most = f", most of it from {source} ({added:.3g})" if added > 0 else ""
    yield (
        f"Without it another order of operations moves them by {measured.logits.fast.max:.3g}{most}; "
        f"{_first_difference_text(measured)}. {bound}"
    )
